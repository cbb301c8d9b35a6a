"""From the name of a model to the model that an engine runs. Needs the packages of the extra `demo`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax_layers
from flax_layers.checkpoint import Checkpoint, CheckpointError, LoRA, load_lora, smollm2_path
from flax_layers.models import Llama, ServedLlama

from .hub import HUB_NAME, download
from .model_options import ModelOptions


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
    checkpoint: Checkpoint, options: ModelOptions, adapters: Mapping[str, LoRA] | None = None
) -> ServedLlama:
    """Returns the model of a checkpoint.

    Args:
        checkpoint: As `flax_layers.checkpoint.load_checkpoint` returns it.
        options: How it is loaded.
        adapters: As `load_adapters` returns them, which is called by default.

    Raises:
        FileNotFoundError: As `load_adapters`.
        CheckpointError: As `load_adapters`.
    """
    adapters = load_adapters(checkpoint, options) if adapters is None else adapters
    cache_dtype = {"auto": None, "fp8_e4m3": "float8_e4m3fn"}.get(options.kv_cache_dtype, options.kv_cache_dtype)
    return ServedLlama(load_weights(checkpoint, options), adapters=adapters, cache_dtype=cache_dtype)


def load_adapters(checkpoint: Checkpoint, options: ModelOptions) -> dict[str, LoRA]:
    """Returns the LoRA adapters that the options name.

    Raises:
        FileNotFoundError: If a folder or a file in it is missing.
        CheckpointError: If an adapter is not one for this checkpoint.
    """
    return {name: load_lora(path, checkpoint.config) for name, path in options.adapters().items()}


def load_weights(checkpoint: Checkpoint, options: ModelOptions) -> Llama:
    """Returns the weights, as `ServedLlama.with_weights` takes them; for arguments see `load_model`."""
    dtype: Any = checkpoint.dtype if options.dtype == "auto" else options.dtype
    model = Llama.from_checkpoint(checkpoint, dtype=dtype, param_dtype=dtype)
    if options.quantization is None:
        return model
    # The output projection keeps its accuracy, tied or not.
    rules: Any = None if model.lm_head is None else {"lm_head": False}
    flax_layers.convert(model, rules, quantize="int8")
    return model


__all__ = ["CheckpointError", "find_model", "load_adapters", "load_model", "load_weights"]
