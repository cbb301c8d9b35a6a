"""Which keys a query sees: one interval of absolute positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.parts.xla.where import where

POSITION_LIMIT = 1 << 30
"""Positions stay below it, so that sums of positions and windows fit in int32."""


class MaskBounds(NamedTuple):
    """Keys [first, last) that a query sees; (0, 0) for none. int32 arrays of one shape."""

    first: jax.Array
    last: jax.Array

    def in_block(self, start: jax.Array, keys: int) -> jax.Array:
        """Returns whether any key of the block [start, start + keys) is seen."""
        return lax.lt(lax.max(self.first, start), lax.min(self.last, lax.add(start, np.int32(keys))))

    def blocks(self, key_block: int) -> tuple[jax.Array, jax.Array]:
        """Returns the range of key blocks that holds all keys seen by anyone."""
        some = self.last > self.first
        lowest = jnp.min(jnp.where(some, self.first, POSITION_LIMIT))
        highest = jnp.max(jnp.where(some, self.last, 0))
        # Not `//`, which minds signs: none is negative.
        size = jnp.int32(key_block)
        return lax.div(lowest, size), lax.div(highest + (size - 1), size)


def mask_bounds(
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    queries: jax.Array,
    *,
    causal: bool,
    window: tuple[int, int] | None,
) -> MaskBounds:
    """Returns what each query sees.

    Args:
        offsets: (B,) int32, absolute position of the first query of each sequence.
        query_lengths: (B,) int32; later queries see nothing.
        key_lengths: (B,) int32; later keys are seen by no query.
        queries: (B, T) int32, indices of the queries; those outside [0, query_lengths) see nothing.
        causal: Whether a query sees no later position than its own.
        window: Keys before and after its own position that a query sees at most.

    Returns:
        (B, T) intervals.
    """
    position = offsets[:, None] + queries
    first = jnp.zeros_like(position)
    last = jnp.broadcast_to(key_lengths[:, None], position.shape)
    if causal:
        last = jnp.minimum(last, position + 1)
    if window is not None:
        before, after = (min(w, POSITION_LIMIT) for w in window)
        first = jnp.maximum(first, position - before)
        last = jnp.minimum(last, position + after + 1)
    inside = lax.bitwise_and(lax.ge(queries, np.int32(0)), lax.lt(queries, query_lengths[:, None]))
    some = lax.bitwise_and(inside, lax.gt(last, first))
    return MaskBounds(where(some, first, 0), where(some, last, 0))
