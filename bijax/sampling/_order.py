"""Comparisons of floats as integers, which no compiler rounds or flushes, and argmax with the first of ties."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.parts.xla.manual_axes import vary_alike

NO_TOKEN = -1
_NAN = np.int32(2**31 - 1)


def ordered(x: jax.Array) -> jax.Array:
    """Returns int32 in the order of x, float32; both zeros are equal, a nan is above everything."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(bits == np.int32(-(2**31)), np.int32(0), bits)
    return jnp.where(jnp.isnan(x), _NAN, bits ^ ((bits >> np.int32(31)) & _NAN))


_LOWEST = int(np.int32(np.float32(-np.inf).view(np.int32)) ^ _NAN)


def first_largest(x: jax.Array) -> jax.Array:
    """Returns the lowest index (R,) of the largest of each row (R, V), or -1 if it holds a nan or only -inf."""
    keys = ordered(x)
    largest = jnp.max(keys, axis=-1, keepdims=True)
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(keys == largest, index, np.int32(x.shape[-1])), axis=-1)
    known = (largest != _NAN) & (largest != np.int32(_LOWEST))
    return jnp.where(known[:, 0], first, np.int32(NO_TOKEN))


def smallest(holds: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Returns the smallest t (R, 1) int32 that is not negative and for which `holds`, row by row.

    Args:
        holds: Monotone function of t (R, 1) int32 to (R, 1) bool that holds for 2**31 - 1.
        rows: (R, 1), only its type is used.
    """

    def halve(step: jax.Array, low: jax.Array) -> jax.Array:
        half = lax.shift_left(np.int32(1), np.int32(30) - step)
        return jnp.where(holds(low + (half - np.int32(1))), low, low + half)

    _, zero = vary_alike((rows, jnp.zeros(rows.shape, jnp.int32)))
    return lax.fori_loop(np.int32(0), np.int32(31), halve, zero)
