"""Picking rows by number, on any platform."""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour


def pick_rows(x: jax.Array, place: jax.Array, *, functions: ElementwiseContract = XLA_FUNCTIONS) -> jax.Array:
    """Copies rows.

    Args:
        x: (S, C), S at least 1.
        place: (M, 1) int32, the row of `x` for each row of the result; -1 for a row of zeros.
        functions: How element-wise code is computed, of which there is a choice alone.

    Returns:
        (M, C) of the dtype of `x`.

    Guarantee: row-invariant: a copy is exact.

    Example:
        >>> pick_rows(jnp.array([[1.0], [2.0]]), jnp.array([[1], [-1], [0]])).tolist()
        [[2.0], [0.0], [1.0]]
    """
    honour("pick_rows", functions, XLA_FUNCTIONS)
    rows = jnp.take(x, place[:, 0], axis=0, mode="clip")
    return jnp.where(place >= 0, rows, jnp.zeros((), x.dtype))
