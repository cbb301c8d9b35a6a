"""Sorting whole tuples of integers, which has a unique result."""

import jax
from jax import lax

from bijax.core.tag import kernel_code


def sort_tuples(*columns: jax.Array) -> tuple[jax.Array, ...]:
    """Sorts arrays of integers together along the last axis: by the first one, then by the second one, and so on.

    Tuples that are equal are indistinguishable, so an unstable sort has the same result.

    Example:
        >>> import jax.numpy as jnp
        >>> [column.tolist() for column in sort_tuples(jnp.array([2, 1, 1]), jnp.array([0, 2, 1]))]
        [[1, 1, 2], [1, 2, 0]]
    """
    with kernel_code():
        return tuple(lax.sort(columns, num_keys=len(columns)))
