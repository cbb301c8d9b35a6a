"""Picking rows by number on a CPU."""

import jax
import jax.numpy as jnp

from pallas_kernels.parts.no_row import NO_ROW, WRONG
from pallas_kernels.pick.filled import filled


def pick_rows(x: jax.Array, place: jax.Array, order: jax.Array | None = None) -> jax.Array:
    """Returns what `portable.pick_rows` returns.

    Guarantee: row-invariant: a copy is exact.
    """
    del order
    # Rows of zeros and of nan stand behind the others: a gather that is fused with a choice goes element by element.
    others = filled(jnp.zeros((2, x.shape[1]), x.dtype), jnp.array([[NO_ROW], [WRONG]], jnp.int32))
    at = jnp.where(place[:, 0] < 0, x.shape[0] - 1 - place[:, 0], place[:, 0])
    return jnp.take(jnp.concatenate([x, others]), at, axis=0, mode="clip")
