"""Arrays whose parts are divided into groups, as products have them whose columns are cut over devices."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def ungrouped(x: jax.Array, sizes: Sequence[int], groups: int, axis: int = -1) -> jax.Array:
    """Returns an array with its parts one after another, given groups that have a share of every part.

    Args:
        x: The array; the length of the axis is the sum of the sizes times the number of groups.
        sizes: Size of the share of each part that a group has.
        groups: Number of groups.
        axis: Which axis, negative.

    Example:
        >>> ungrouped(jnp.array([1, 2, 10, 3, 4, 20]), (2, 1), 2).tolist()  # two groups of two numbers and one
        [1, 2, 3, 4, 10, 20]
    """
    if len(sizes) == 1 or groups == 1:
        return x
    before, after = x.shape[:axis], x.shape[x.ndim + axis + 1 :]
    ends = [sum(sizes[:i]) for i in range(1, len(sizes))]
    parts = jnp.split(x.reshape(*before, groups, sum(sizes), *after), ends, axis=axis)
    return jnp.concatenate([p.reshape(*before, groups * p.shape[axis], *after) for p in parts], axis=axis)
