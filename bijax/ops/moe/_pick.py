"""Copying rows by number."""

import jax
import jax.numpy as jnp

from bijax.dispatch.routing import pick_kernel


def pick_rows(x: jax.Array, place: jax.Array, order: jax.Array | None = None) -> jax.Array:
    """Returns the rows of x (S, C) at `place` (R,) int32; zeros at -1, nan at -2, and at -3 unspecified rows.

    Args:
        x: The rows.
        place: Which.
        order: (R,) int32, the order in which a GPU copies the rows of the result, each once; it changes no bit.
    """
    if 0 in x.shape:
        return jnp.zeros((place.size, x.shape[1]), x.dtype)
    return pick_kernel(x, place[:, None], *(() if order is None else (order[:, None],)))[0]
