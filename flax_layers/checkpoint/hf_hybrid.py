"""Hugging Face folders of Qwen3-Next and Qwen3.5: their fields, and their names of weights."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from .errors import CheckpointError
from .linear_attention import LinearAttentionConfig

type Fields = dict[str, Any]
type Shape = tuple[int, ...]
type Read = Callable[[str, int | None], np.ndarray]
"""Reads a tensor as float32, or its row `i`."""

HYBRIDS: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_WITH_IMAGES: Final = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

_OTHER_PARTS: Final = re.compile(r"(model\.visual|visual)\.")
"""Weights of the images' encoder."""

_FUSED: Final = ("in_proj_qkvz", "in_proj_ba")

_OF_IMAGES: Final = ("mrope_section", "mrope_interleaved")
"""How positions of images are divided. The positions of a text are all equal, so these change nothing."""


def text_fields(fields: Fields, path: Path) -> Fields:
    """Returns the fields of the text model in a `config.json` that has models for images too; else all of them.

    Raises:
        CheckpointError: If the part for texts is missing or of another type, or the two parts contradict each other.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _WITH_IMAGES:
        return fields
    text = fields.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", _WITH_IMAGES[kind]) != _WITH_IMAGES[kind]:
        raise CheckpointError(
            f"{path}: text_config must be an object with the model type {_WITH_IMAGES[kind]!r}, got {text!r}; the file"
            " is damaged"
        )
    found = {**text, "model_type": _WITH_IMAGES[kind]}
    for name in ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "auto_map"):
        if name in fields and found.setdefault(name, fields[name]) != fields[name]:
            raise CheckpointError(
                f"{path}: {name} must be the same in text_config and outside of it, got {found[name]!r} and"
                f" {fields[name]!r}; leave one of them"
            )
    return found


def rotary_fields(fields: Fields, path: Path) -> Fields:
    """Returns the fields with `partial_rotary_factor` at the top level, whichever place states it, and without mrope.

    Raises:
        CheckpointError: If it is stated twice with other values.
    """
    fields = dict(fields)
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if not isinstance(rope, dict):
            continue
        rope = {field: value for field, value in rope.items() if field not in _OF_IMAGES}
        stated = rope.pop("partial_rotary_factor", None)
        if stated is not None and fields.setdefault("partial_rotary_factor", stated) != stated:
            raise CheckpointError(
                f"{path}: states partial_rotary_factor twice, got {fields['partial_rotary_factor']!r} and {stated!r};"
                " leave one of them"
            )
        if rope.get("rope_type", rope.get("type")) is None:
            rope["rope_type"] = "default"
        fields[name] = rope
    return fields


def plain_names(
    found: Mapping[str, Shape], read: Read, linear: LinearAttentionConfig
) -> tuple[dict[str, Shape], Callable[[str], np.ndarray]]:
    """Returns the tensors of a folder under the names of `checkpoint.weights.expected_shapes`, and what reads them.

    The prefix of models for images is dropped, with the weights for images. Products that are stored together are parts
    of what is stored: Qwen3-Next's `in_proj_qkvz` and `in_proj_ba`, and stacked experts. `mtp.*` keeps its names.

    Args:
        found: The shape of each tensor.
        read: Reads one.
        linear: The sizes of linear attention.
    """
    shapes: dict[str, Shape] = {}
    readers: dict[str, Callable[[], np.ndarray]] = {}

    def add(name: str, shape: Shape, reader: Callable[[], np.ndarray]) -> None:
        if name in shapes:
            raise CheckpointError(f"the folder holds {name} twice, in two layouts; get it again")
        shapes[name], readers[name] = shape, reader

    for stored, shape in found.items():
        if _OTHER_PARTS.match(stored):
            continue
        name = stored.replace("model.language_model.", "model.", 1)
        stem, _, last = name.rpartition(".")
        block, _, kind = stem.rpartition(".")
        if last == "weight" and kind in _FUSED and shape[:1] == (_size(kind, linear),):
            for part, rows in _rows(kind, linear).items():
                add(f"{block}.{part}.weight", (rows.size, *shape[1:]), _picked(read, stored, rows))
        elif last in ("gate_up_proj", "down_proj") and stem.endswith(".experts") and len(shape) == 3:
            for expert in range(shape[0]):
                for part, here in _expert_parts(last, shape[1]).items():
                    size = (here.stop - here.start, shape[2])
                    add(f"{stem}.{expert}.{part}.weight", size, _sliced(read, stored, expert, here))
        else:
            add(name, shape, _whole(read, stored))
    return shapes, lambda name: readers[name]()


def _whole(read: Read, stored: str) -> Callable[[], np.ndarray]:
    return lambda: read(stored, None)


def _picked(read: Read, stored: str, rows: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: read(stored, None)[rows]


def _sliced(read: Read, stored: str, expert: int, rows: slice) -> Callable[[], np.ndarray]:
    return lambda: read(stored, expert)[rows]


def _expert_parts(kind: str, rows: int) -> dict[str, slice]:
    if kind == "down_proj":
        return {"down_proj": slice(0, rows)}
    return {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}


def _size(kind: str, linear: LinearAttentionConfig) -> int:
    return linear.num_key_heads * sum(_sizes(kind, linear).values())


def _sizes(kind: str, linear: LinearAttentionConfig) -> dict[str, int]:
    """Returns the rows that each part has for a key head, in the order in which they are stored."""
    group = linear.num_value_heads // linear.num_key_heads
    if kind == "in_proj_ba":
        return {"b": group, "a": group}
    values = group * linear.value_dim
    return {"q": linear.key_dim, "k": linear.key_dim, "v": values, "z": values}


def _rows(kind: str, linear: LinearAttentionConfig) -> dict[str, np.ndarray]:
    """Returns which rows of a product that is stored by key heads make up each of its parts, in plain order."""
    keys, sizes = linear.num_key_heads, _sizes(kind, linear)
    parts = {"in_proj_b": "b", "in_proj_a": "a"} if kind == "in_proj_ba" else {"in_proj_qkv": "qkv", "in_proj_z": "z"}
    ends = np.cumsum(list(sizes.values()))
    heads = np.arange(keys * ends[-1]).reshape(keys, ends[-1])
    pieces = dict(zip(sizes, np.split(heads, ends[:-1], axis=1), strict=True))
    return {name: np.concatenate([pieces[p].reshape(-1) for p in letters]) for name, letters in parts.items()}
