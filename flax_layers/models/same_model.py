"""Checks that weights belong to a model with the same configuration."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import jax

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig

_TOKENS: Final = ("bos_token_id", "eos_token_ids")
"""Fields that no number of a model depends on."""


def check_same_config(op: str, what: str, config: LlamaConfig, expected: LlamaConfig) -> None:
    """Checks that two configurations are those of one model; their bos and eos tokens may differ.

    Args:
        op: Whose argument it is.
        what: What it belongs to, such as "the weights".
        config: Of the argument.
        expected: Of the model.

    Raises:
        ValueError: If not. The message names the fields.
    """
    names = [field.name for field in dataclasses.fields(expected) if field.name not in _TOKENS]
    pairs = [(name, getattr(config, name), getattr(expected, name)) for name in names]
    differences = [f"{name}={theirs!r} instead of {ours!r}" for name, theirs, ours in pairs if theirs != ours]
    if differences:
        raise ValueError(f"{op}: {what} must have the configuration of the model, got {', '.join(differences)}.")


def check_same_arrays(op: str, weights: Any, expected: Any) -> None:
    """Checks that two trees of arrays have the same names, shapes and dtypes.

    Args:
        op: Whose argument it is.
        weights: The argument.
        expected: Those of the model.

    Raises:
        ValueError: If not. The message names the first difference.
    """
    theirs, ours = (_described(tree) for tree in (weights, expected))
    rule = f"{op}: the weights must have the names, shapes and dtypes of the model's own"
    if theirs != ours:
        name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
        found, wanted = theirs.get(name, "no such array"), ours.get(name, "no such array")
        raise ValueError(f"{rule}; for {name} expected {wanted}, got {found}.")
    structures: list[Any] = [jax.tree.structure(tree) for tree in (weights, expected)]
    if structures[0] != structures[1]:
        raise ValueError(f"{rule}, and be in variables of the same types; got {structures[0]}.")


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
