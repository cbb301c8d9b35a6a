"""Picking rows by number, on any platform."""

import jax
import jax.numpy as jnp

from pallas_kernels.pick.filled import filled


def pick_rows(x: jax.Array, place: jax.Array, order: jax.Array | None = None) -> jax.Array:
    """Copies rows.

    Args:
        x: (S, C), S at least 1.
        place: (M, 1) int32, the row of `x` for each row of the result; -1 for a row of zeros, -2 for a row of nans
            (zeros for integers), -3 for a row that nobody reads: zeros here, while a GPU may leave it unwritten.
        order: (M, 1) int32, the order in which other backends copy rows one by one; not used here.

    Returns:
        (M, C) of the dtype of `x`.

    Guarantee: row-invariant: a copy is exact.

    Example:
        >>> pick_rows(jnp.array([[1.0], [2.0]]), jnp.array([[1], [-1], [0], [-2]])).tolist()
        [[2.0], [0.0], [1.0], [nan]]
    """
    del order
    return filled(jnp.take(x, place[:, 0], axis=0, mode="clip"), place)
