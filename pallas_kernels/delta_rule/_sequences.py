"""Functions of one sequence, applied to the arrays of several."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def each(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Applies a function to each entry of arrays (B, ...).

    For one entry it is called directly: under `vmap` a slice at an index that differs by entry becomes a gather or
    scatter, which a CPU compiles and runs more slowly.
    """
    if arrays[0].shape[0] != 1:
        return jax.vmap(function)(*arrays)
    return jax.tree.map(lambda y: y[None], function(*(x[0] for x in arrays)))


def get(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    """Returns a slice along `axis` of (B, ...), which starts at another place (B,) in each entry."""
    return each(lambda x, start: lax.dynamic_slice_in_dim(x, start, size, axis - 1), x, start)


def put(x: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """Writes slices along `axis` into (B, ...), each from its own place (B,) on."""
    return each(lambda x, new, start: lax.dynamic_update_slice_in_dim(x, new, start, axis - 1), x, new, start)
