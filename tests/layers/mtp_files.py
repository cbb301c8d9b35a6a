"""Tiny random checkpoints with a head for multi-token prediction, of each model type that has one."""

from pathlib import Path
from typing import Any, Final

import numpy as np

from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.weights import block_shapes, expected_shapes
from tests.layers import checkpoint_files as files
from tests.layers import hybrid_files as hybrid
from tests.layers.deepseek_files import V3

KINDS: Final = (*hybrid.KINDS, "deepseek_v3")
_LAYER: Final = f"model.layers.{V3['num_hidden_layers']}"


def fields_of(kind: str) -> dict[str, Any]:
    """The fields of `config.json`."""
    return V3 if kind == "deepseek_v3" else hybrid.fields(kind)


def weights_of(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """Weights in the names and the layout of a folder; `folder` is for a configuration."""
    files.write_folder(folder, fields_of(kind))
    config, rng = hf_config(folder), np.random.default_rng(11)
    width = config.hidden_size
    if kind == "deepseek_v3":
        shapes = dict(expected_shapes(config))
        shapes |= block_shapes(_LAYER, config, config.num_layers)
        shapes |= {f"{_LAYER}.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{_LAYER}.eh_proj.weight"] = (width, 2 * width)
        drawn = {name: _draw(rng, name, shape) for name, shape in shapes.items()}
        copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
        return drawn | {f"{_LAYER}.{name}.weight": drawn[model] for name, model in copies.items()}
    prefix = "model" if kind == "qwen3_next" else "model.language_model"
    stored, full = hybrid.weights(kind), f"{prefix}.layers.1."
    shapes = {n.replace(full, "mtp.layers.0."): w.shape for n, w in stored.items() if n.startswith(full)}
    shapes |= {f"mtp.{name}.weight": (width,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = (width, 2 * width)
    return stored | {name: _draw(rng, name, shape, zero_centred=True) for name, shape in shapes.items()}


def write_model(path: Path, kind: str) -> Path:
    """Writes a folder."""
    return files.write_folder(path, fields_of(kind), weights_of(kind, path))


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], *, zero_centred: bool = False) -> np.ndarray:
    drawn = rng.standard_normal(shape)
    if len(shape) == 1:
        return (drawn / 8 + (not zero_centred and name.endswith("norm.weight"))).astype(np.float32)
    return (drawn / (1 if "embed_tokens" in name else shape[-1] ** 0.5)).astype(np.float32)
