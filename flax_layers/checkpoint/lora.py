"""LoRA adapters from disk, in the folders that the package `peft` writes."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors

from .config import LlamaConfig
from .errors import CheckpointError
from .hf_fields import flag, number, read_json, whole_number
from .hf_weights import read_header
from .weights import Shape, expected_shapes

_CONFIG: Final = "adapter_config.json"
_FILE: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(r"base_model\.model\.(model\.layers\.\d+\.[\w.]+)\.lora_([AB])\.weight")
_KERNEL: Final = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
_CHANGES_THE_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Initialisations after which the adapter belongs to other weights of the base than those published."""

# Fields that must be absent, null, false or empty, and why.
_REFUSED: Final = {
    "use_dora": "DoRA's magnitudes are not supported",
    "fan_in_fan_out": "kernels are stored as (out, in) here",
    "lora_bias": "biases of adapters are not supported",
    "use_qalora": "QALoRA is not supported",
    "modules_to_save": "only LoRA matrices are read; train without it",
    "rank_pattern": "one adapter has one rank",
    "alpha_pattern": "one adapter has one alpha",
    "layer_replication": "the layers are those of the base model",
    "trainable_token_indices": "embeddings are not adapted",
    "target_parameters": "only linear layers are adapted",
    "alora_invocation_tokens": "activated LoRA is not supported",
}


@dataclass(frozen=True)
class LoRA:
    """A LoRA adapter: for some linear layers of a model, two matrices whose product is added to the kernel.

    Attributes:
        rank: Columns of the one matrix and rows of the other.
        scaling: Factor of the product: alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA.
        down: By the layer's name ("model.layers.0.self_attn.q_proj"), lora_A, (rank, in) float32.
        up: By the same names, lora_B, (out, rank) float32.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; Kalajdzievski, "A Rank Stabilization
    Scaling Factor for Fine-Tuning with LoRA", 2023.

    Example:
        >>> down, up = np.ones((1, 3), np.float32), np.ones((2, 1), np.float32)
        >>> name = "model.layers.0.self_attn.q_proj"
        >>> LoRA(rank=1, scaling=2.0, down={name: down}, up={name: up}).change(name).tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """

    rank: int
    scaling: float
    down: Mapping[str, np.ndarray] = field(repr=False)
    up: Mapping[str, np.ndarray] = field(repr=False)

    def change(self, layer: str) -> np.ndarray:
        """Returns what the adapter adds to a kernel (out, in), in float64."""
        up, down = self.up[layer].astype(np.float64), self.down[layer].astype(np.float64)
        return self.scaling * (up @ down)


def load_lora(folder: str | os.PathLike[str], config: LlamaConfig) -> LoRA:
    """Reads an adapter: a folder with `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        folder: The folder, as `save_pretrained` of peft writes it.
        config: Of the base model.

    Raises:
        FileNotFoundError: If there is no such folder, or a file is missing.
        CheckpointError: If the adapter is not LoRA, changes something other than linear layers of the blocks, belongs
            to another model, or is damaged.
    """
    folder = Path(folder)
    rank, scaling = _read_config(folder)
    path = folder / _FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} lacks {_FILE}; save the adapter with save_pretrained(safe_serialization=True)"
        )
    pairs = _pairs(read_header(path), rank, config, path)
    read: dict[str, dict[str, np.ndarray]] = {"A": {}, "B": {}}
    with safetensors.safe_open(path, framework="np") as file:
        for layer, names in pairs.items():
            for side, name in names.items():
                value = np.asarray(file.get_tensor(name), dtype=np.float32)
                if not np.isfinite(value).all():
                    raise CheckpointError(f"{path}: {name} holds inf or nan; the training of the adapter has diverged")
                read[side][layer] = value
    return LoRA(rank, scaling, read["A"], read["B"])


def _read_config(folder: Path) -> tuple[int, float]:
    """Returns the rank and the scaling."""
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a folder with {_CONFIG}; give the folder of a LoRA adapter, as save_pretrained of peft"
            " writes it"
        )
    fields = read_json(path)
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type must be 'LORA', got {fields.get('peft_type')!r}")
    for name, reason in _REFUSED.items():
        if fields.get(name) not in (None, False, {}, []):
            raise CheckpointError(f"{path}: {name} must be absent or empty, got {fields[name]!r}: {reason}")
    if fields.get("bias") not in (None, "none"):
        raise CheckpointError(
            f"{path}: bias must be 'none', got {fields['bias']!r}: the adapter would change the biases of the base"
        )
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights must not be {start!r}, which changes the weights of the base too; save the"
            " adapter with path_initial_model_for_weight_conversion, which makes it one for the published weights"
        )
    rank, alpha = whole_number(fields, "r", path), number(fields.get("lora_alpha"), "lora_alpha", path)
    if rank < 1:
        raise CheckpointError(f"{path}: r must be at least 1, got {rank}")
    if alpha <= 0:
        raise CheckpointError(f"{path}: lora_alpha must be a positive number, got {alpha}")
    return rank, alpha / (rank**0.5 if flag(fields, "use_rslora", path) else rank)


def _pairs(found: Mapping[str, Shape], rank: int, config: LlamaConfig, path: Path) -> dict[str, dict[str, str]]:
    """Returns the names of the two tensors of each layer, with their shapes checked."""
    kernels = {
        name.removesuffix(".weight"): shape for name, shape in expected_shapes(config) if _KERNEL.fullmatch(name)
    }
    pairs: dict[str, dict[str, str]] = {}
    for name, shape in found.items():
        match = _TENSOR.fullmatch(name)
        layer: Any = match and match[1]
        if match is None or layer not in kernels:
            raise CheckpointError(
                f"{path}: holds {name}, which is no LoRA matrix of a linear layer that the base model has; adapted are"
                f" {', '.join(sorted({layer.rpartition('.')[2] for layer in kernels}))} of"
                f" {config.num_layers} layers: check the adapter's target_modules and base model"
            )
        out_features, in_features = kernels[layer]
        expected = (rank, in_features) if match[2] == "A" else (out_features, rank)
        if shape != expected:
            raise CheckpointError(
                f"{path}: {name} must have the shape {expected} by r={rank} and the base model, got {shape}; adapter"
                " and base model do not belong together"
            )
        pairs.setdefault(layer, {})[match[2]] = name
    alone = [layer for layer, names in pairs.items() if len(names) != 2]
    if alone or not pairs:
        raise CheckpointError(
            f"{path}: expected lora_A and lora_B of at least one layer, got"
            f" {f'only one of {alone[0]}' if alone else 'no tensors'}; the file is incomplete: get it again"
        )
    return pairs
