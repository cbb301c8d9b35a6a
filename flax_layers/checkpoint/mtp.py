"""The weights of a multi-token prediction (MTP) head: their names and shapes, and their part of a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from .config import LlamaConfig
from .errors import CheckpointError
from .weights import SHOWN, Shape, Weights, block_shapes, check_shape

if TYPE_CHECKING:
    from .load import Checkpoint

PREFIX: Final = "mtp."

_FROM_DEEPSEEK: Final = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
"""DeepSeek's names in the layer after the last one, and Qwen's."""

_COPIES: Final = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
"""Weights that the head shares with the model, of which folders may hold a copy."""


def mtp_shapes(config: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    """Yields the name and the shape of every weight of the head of a model, in Qwen's names.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny()
        >>> dict(mtp_shapes(config))["mtp.fc.weight"]
        (8, 16)
    """
    width = config.hidden_size
    yield f"{PREFIX}fc.weight", (width, 2 * width)
    yield f"{PREFIX}pre_fc_norm_embedding.weight", (width,)
    yield f"{PREFIX}pre_fc_norm_hidden.weight", (width,)
    yield from block_shapes(f"{PREFIX}layers.0", config.mtp_block(), 0)
    yield f"{PREFIX}norm.weight", (width,)


def mtp_names(stored: Iterable[str], config: LlamaConfig) -> dict[str, str]:
    """Returns Qwen's names of the tensors of a head, with the names that the folder has for them.

    Args:
        stored: The names of all tensors of a folder.
        config: The model's numbers. DeepSeek has the head in the layers after its last one.
    """
    found: dict[str, str] = {}
    layers = {f"model.layers.{config.num_layers + i}.": i for i in range(config.draft_layers)}
    for name in stored:
        if config.linear is not None and name.startswith(PREFIX):
            found[name] = name
            continue
        layer = next((prefix for prefix in layers if name.startswith(prefix)), None)
        if layer is not None:
            rest = name.removeprefix(layer)
            inner = f"layers.{layers[layer]}.{rest}"
            found[PREFIX + (_FROM_DEEPSEEK.get(rest, inner) if layers[layer] == 0 else inner)] = name
    return found


def checked_mtp_weights(checkpoint: Checkpoint) -> Weights:
    """Returns the weights of a checkpoint's head, in the order of `mtp_shapes`.

    Raises:
        CheckpointError: If it has none, a weight is missing, has another shape or is one that the head would not use,
            or its copy of a weight that the head shares with the model has different bits.
    """
    held = checkpoint.mtp
    if held is None:
        raise CheckpointError(
            "expected a checkpoint with an MTP head (tensors mtp.*, or a layer after the last one with"
            " num_nextn_predict_layers 1), got one without; use a checkpoint that has one, or drafts by prompt lookup"
        )
    shapes = dict(mtp_shapes(checkpoint.config))
    missing = [name for name in shapes if name not in held]
    if missing:
        raise CheckpointError(
            f"weights of the MTP head are missing, the first of them {', '.join(missing[:SHOWN])}; the checkpoint"
            f" holds {len(held)} of its tensors: get the complete one"
        )
    copies = {PREFIX + name: model for name, model in _COPIES.items() if PREFIX + name in held}
    surplus = sorted(set(held) - set(shapes) - set(copies))
    if surplus:
        raise CheckpointError(
            f"the MTP head must have one layer and the tensors of its configuration, got {', '.join(surplus[:SHOWN])}"
            " too; heads of several layers are not supported"
        )
    for name, shape in shapes.items():
        check_shape(name, shape, held.shapes[name])
    for name, model in copies.items():
        _check_copy(checkpoint, held, name, model)
    return Weights(shapes, held.__getitem__)


def _check_copy(checkpoint: Checkpoint, held: Weights, name: str, model: str) -> None:
    if checkpoint.config.tie_word_embeddings and model == "lm_head.weight":
        model = "model.embed_tokens.weight"
    ours, theirs = checkpoint.weights[model], held[name]
    if ours.shape != theirs.shape or not np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)):
        raise CheckpointError(
            f"the MTP head must share {model} with the model, but its copy {name} has other values; a head with weights"
            " of its own there is not supported"
        )
