"""Picking rows by number on a CPU."""

import jax
import jax.numpy as jnp

from pallas_kernels.parts.no_row import NO_ROW, UNREAD, WRONG
from pallas_kernels.pick.filled import filled


def pick_rows(x: jax.Array, place: jax.Array, order: jax.Array | None = None) -> jax.Array:
    """Equal to `portable.pick_rows`.

    Guarantee: row-invariant: a copy is exact.
    """
    del order
    # Rows of zeros and of nan are appended: a gather fused with a select would run element by element.
    others = filled(jnp.zeros((2, x.shape[1]), x.dtype), jnp.array([[NO_ROW], [WRONG]], jnp.int32))
    at = jnp.where(place[:, 0] == UNREAD, NO_ROW, place[:, 0])
    at = jnp.where(at < 0, x.shape[0] - 1 - at, at)
    return jnp.take(jnp.concatenate([x, others]), at, axis=0, mode="clip")
