"""From the name of a model to the model that an engine runs. Needs the packages of the extra `demo`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import jax
import numpy as np
from jax.sharding import Mesh

import flax_layers
from flax_layers.checkpoint import Checkpoint, CheckpointError, LoRA, load_lora, smollm2_path
from flax_layers.checkpoint.mtp import checked_mtp_weights
from flax_layers.models import (
    DraftingPartitionedLlama,
    Llama,
    MTPHead,
    PartitionedLlama,
    ServedLlama,
    ServedPartitionedLlama,
    load_partitioned,
    partition_head,
)
from flax_layers.models.partition_checks import check_config, check_sizes

from .hub import HUB_NAME, download
from .model_options import ModelOptions
from .options import EngineOptions

AXIS: Final = "model"
"""The mesh axis that a model is cut over."""

EXPERT_AXIS: Final = "expert"
"""The mesh axis that only experts are cut over."""


def find_model(name: str | os.PathLike[str] | None) -> Path:
    """Returns the path of a checkpoint.

    Args:
        name: A GGUF file, a Hugging Face folder, or the name of a model on the Hugging Face hub, such as
            "Qwen/Qwen2.5-0.5B-Instruct", which is downloaded if it is not in the hub's cache. None for
            SmolLM2-135M-Instruct. A path that exists is never taken for a name on the hub.

    Raises:
        FileNotFoundError: If there is no such file or folder, or the model cannot be downloaded. The message says what
            to do.
    """
    if name is None:
        return smollm2_path()
    path = Path(name)
    if path.exists() or path.suffix == ".gguf" or not HUB_NAME.fullmatch(os.fspath(name)) or path.parent.exists():
        return path
    return download(os.fspath(name))


def load_model(
    checkpoint: Checkpoint, options: ModelOptions, *, draft_head: bool = False
) -> ServedLlama | ServedPartitionedLlama:
    """Returns the model of a checkpoint.

    Args:
        checkpoint: As `flax_layers.checkpoint.load_checkpoint` returns it.
        options: How it is loaded.
        draft_head: Whether its head for multi-token prediction is loaded too.

    Raises:
        FileNotFoundError: As `load_adapters`.
        CheckpointError: As `load_adapters`, or if the checkpoint has no head that can be loaded, and one is requested.
        ValueError: If there are too few devices, or the model cannot be cut over them.
    """
    return load_models(checkpoint, options, draft_head=draft_head)[0]


def load_adapters(checkpoint: Checkpoint, options: ModelOptions) -> dict[str, LoRA]:
    """Returns the LoRA adapters that the options name.

    Raises:
        FileNotFoundError: If a folder or a file in it is missing.
        CheckpointError: If an adapter is not one for this checkpoint.
    """
    return {name: load_lora(path, checkpoint.config) for name, path in options.adapters().items()}


def load_models(
    checkpoint: Checkpoint,
    options: ModelOptions,
    *,
    number: int = 1,
    adapters: Mapping[str, LoRA] | None = None,
    draft_head: bool = False,
) -> list[ServedLlama | ServedPartitionedLlama]:
    """Returns equal models, each on devices of its own.

    Args:
        checkpoint: As for `load_model`.
        options: How they are loaded. Several models need `tensor_parallel_size`.
        number: How many.
        adapters: As `load_adapters` returns them, which is called by default.
        draft_head: As for `load_model`.

    Raises:
        FileNotFoundError: As `load_adapters`.
        CheckpointError: As `load_model`.
        ValueError: As `load_model`, or if several are requested without `tensor_parallel_size`.
    """
    check_model(checkpoint, options, number=number, draft_head=draft_head)
    adapters = load_adapters(checkpoint, options) if adapters is None else adapters
    cache_dtype = {"auto": None, "fp8_e4m3": "float8_e4m3fn"}.get(options.kv_cache_dtype, options.kv_cache_dtype)
    weights = [load_weights(checkpoint, options, replica=replica) for replica in range(number)]
    head = load_head(checkpoint, options) if draft_head else None

    def served(weights: Llama | PartitionedLlama) -> ServedLlama | ServedPartitionedLlama:
        if isinstance(weights, Llama):
            return ServedLlama(weights, adapters=adapters, cache_dtype=cache_dtype, draft_head=head)
        if head is None:
            return ServedPartitionedLlama(weights, adapters=adapters, cache_dtype=cache_dtype)
        cut = partition_head(head, weights)
        return DraftingPartitionedLlama(weights, cut, adapters=adapters, cache_dtype=cache_dtype)

    return [served(w) for w in weights]


def check_model(checkpoint: Checkpoint, options: ModelOptions, *, number: int = 1, draft_head: bool = False) -> None:
    """Checks, before weights are read, that a model can be cut as the options say, and that there are enough devices.

    Args:
        checkpoint: As for `load_model`.
        options: How it is loaded.
        number: Number of models, each on devices of its own.
        draft_head: As for `load_model`.

    Raises:
        CheckpointError: If the checkpoint has no head that can be loaded, and one is requested.
        ValueError: If it cannot be cut, or there are too few devices.
    """
    if draft_head:
        checked_mtp_weights(checkpoint)
    if options.tensor_parallel_size is None:
        if number > 1:
            raise ValueError(
                f"data_parallel_size must be 1 without tensor_parallel_size, got {number}; set tensor_parallel_size to"
                " the devices of each model, 1 for one device."
            )
        return
    size, experts = options.tensor_parallel_size, options.expert_parallel_size
    if experts > 1 and checkpoint.config.experts is None:
        raise ValueError(
            f"expert_parallel_size must be 1 with a model without experts, got {experts}; raise tensor_parallel_size"
            " instead."
        )
    cut = check_sizes(AXIS, size, options.tensor_parallel_leaves, EXPERT_AXIS, experts)
    check_config(checkpoint.config, cut)
    if draft_head:
        check_config(checkpoint.config.mtp_block(), cut)
    mesh_for(size, experts, replica=number - 1)


def check_overlap(checkpoint: Checkpoint, options: ModelOptions, engine: EngineOptions) -> None:
    """Checks, before weights are read, that a model can overlap, if overlap is requested.

    It needs experts on several devices, and no adapters.

    Args:
        checkpoint: As for `load_model`.
        options: How it is loaded.
        engine: The options of the engine.

    Raises:
        ValueError: If it cannot.
    """
    devices = (options.tensor_parallel_size or 1) * options.expert_parallel_size
    if engine.overlap() is None:
        return
    name = "enable_two_batch_overlap" if engine.enable_two_batch_overlap else "enable_single_batch_overlap"
    if options.lora_paths:
        raise ValueError(f"{name} must not be set with lora_paths, got {options.lora_paths!r}; leave either out.")
    if checkpoint.config.experts is not None and devices > 1:
        return
    has = f"experts on {devices} device" if checkpoint.config.experts is not None else "no experts"
    raise ValueError(
        f"{name} needs a model with experts on several devices, got one with {has}; set tensor_parallel_size and"
        " expert_parallel_size, or leave the option out."
    )


def mesh_for(size: int, experts: int = 1, *, replica: int = 0) -> Mesh:
    """Returns the mesh of a model that is cut over devices of this process.

    Args:
        size: Devices of the axis "model".
        experts: Devices of the axis "expert", which the mesh does not have for one device.
        replica: Which of several equal models it is for.

    Raises:
        ValueError: If there are too few devices.
    """
    devices, number = jax.devices(), size * experts
    first = number * replica
    if len(devices) < first + number:
        models = f"{replica + 1} models on {number} devices each" if replica else f"a model on {number} devices"
        raise ValueError(
            f"expected at least {first + number} devices for {models}, got {len(devices)} of the platform"
            f" {devices[0].platform!r}; lower tensor_parallel_size, expert_parallel_size or data_parallel_size."
        )
    own = np.array(devices[first : first + number])
    return Mesh(own, (AXIS,)) if experts == 1 else Mesh(own.reshape(experts, size), (EXPERT_AXIS, AXIS))


def load_weights(checkpoint: Checkpoint, options: ModelOptions, *, replica: int = 0) -> Llama | PartitionedLlama:
    """Returns the weights, as `with_weights` of the model that `load_model` returns takes them.

    Args:
        checkpoint: As for `load_model`.
        options: How they are loaded.
        replica: Which of several equal models they are for.
    """
    dtype: Any = checkpoint.dtype if options.dtype == "auto" else options.dtype
    if options.tensor_parallel_size is not None:
        mesh = mesh_for(options.tensor_parallel_size, options.expert_parallel_size, replica=replica)
        axes: dict[str, Any] = {"axis": AXIS, "expert_axis": EXPERT_AXIS, "leaves": options.tensor_parallel_leaves}
        prepare = None if options.quantization is None else _to_int8
        return load_partitioned(checkpoint, mesh, **axes, dtype=dtype, param_dtype=dtype, prepare=prepare)
    model = Llama.from_checkpoint(checkpoint, dtype=dtype, param_dtype=dtype)
    return model if options.quantization is None else _to_int8(model)


def _to_int8(model: Llama) -> Llama:
    # The output projection keeps its accuracy, tied or not.
    rules: Any = None if model.lm_head is None else {"lm_head": False}
    return cast(Llama, flax_layers.convert(model, rules, quantize="int8"))


def load_head(checkpoint: Checkpoint, options: ModelOptions) -> MTPHead:
    """Returns the head for multi-token prediction of a checkpoint, in the dtype of the model; it is not quantised.

    Args:
        checkpoint: As for `load_model`.
        options: How it is loaded.

    Raises:
        CheckpointError: If the checkpoint has no head that can be loaded.
    """
    dtype: Any = checkpoint.dtype if options.dtype == "auto" else options.dtype
    return MTPHead.from_checkpoint(checkpoint, dtype=dtype, param_dtype=dtype)


def load_update(checkpoint: Checkpoint, options: ModelOptions, *, draft_head: bool = False) -> Any:
    """Returns weights for `with_weights` of the model that `load_model` returned with the same arguments.

    If the checkpoint has no head, the old head stays, which changes no bit.

    Args:
        checkpoint: Other weights of the same model.
        options: As for `load_model`.
        draft_head: The same.

    Raises:
        CheckpointError: If the checkpoint has a head that cannot be loaded.
    """
    weights = load_weights(checkpoint, options)
    return (weights, load_head(checkpoint, options)) if draft_head and checkpoint.mtp is not None else weights


__all__ = [
    "CheckpointError",
    "check_model",
    "check_overlap",
    "find_model",
    "load_adapters",
    "load_head",
    "load_model",
    "load_models",
    "load_update",
    "load_weights",
]
