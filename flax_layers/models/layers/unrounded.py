"""Sums of several devices that have not been rounded yet."""

from typing import Any, NamedTuple

import jax

from bijax.parallel import tree_sum


class Unrounded(NamedTuple):
    """Rows (..., C) in float32 which belong to a residual stream of another dtype: whoever adds them rounds them first.

    Several devices add in float32, and the rounding would be a kernel of its own; `RMSNorm.add` has it in its kernel.
    """

    sum: jax.Array


def rounded(rows: jax.Array | Unrounded, dtype: Any) -> jax.Array:
    """Returns rows that have been rounded to a dtype."""
    return tree_sum(rows.sum[None], dtype=dtype) if isinstance(rows, Unrounded) else rows


def apply_unrounded(layer: Any, x: jax.Array) -> jax.Array | Unrounded:
    """Applies a linear layer whose result is added to the residual stream; it rounds unless it has `unrounded`."""
    unrounded = getattr(layer, "unrounded", None)
    return layer(x) if unrounded is None else unrounded(x)
