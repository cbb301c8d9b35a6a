"""Writes tiny random LoRA adapters as the package `peft` does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from flax_layers.checkpoint import LlamaConfig
from flax_layers.checkpoint.weights import expected_shapes

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def matrices(
    config: LlamaConfig, *, rank: int = 4, targets: tuple[str, ...] = ALL, layers: Any = None, seed: int = 0
) -> dict[str, np.ndarray]:
    """Both matrices of each target, under their names in the file."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in expected_shapes(config):
        stem = name.removesuffix(".weight")
        if not stem.endswith(targets) or (layers is not None and int(stem.split(".")[2]) not in layers):
            continue
        rows, columns = shape
        found[f"{PREFIX}{stem}.lora_A.weight"] = rng.standard_normal((rank, columns)) / columns**0.5
        found[f"{PREFIX}{stem}.lora_B.weight"] = rng.standard_normal((rows, rank)) / rank**0.5
    return {name: value.astype(np.float32) for name, value in found.items()}


def write(
    folder: Path, config: LlamaConfig, *, fields: dict[str, Any] | None = None, tensors: Any = None, **how: Any
) -> Path:
    """Writes an adapter; `how` as for `matrices`, `fields` replace those of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, targets = how.get("rank", 4), how.get("targets", ALL)
    written = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.1,
        "target_modules": list(targets), "bias": "none", "use_rslora": False, "use_dora": False,
        "fan_in_fan_out": False, "init_lora_weights": True, "modules_to_save": None, "rank_pattern": {},
        "alpha_pattern": {}, "inference_mode": True, "base_model_name_or_path": "base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written | (fields or {})))
    save_file(matrices(config, **how) if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder
