"""Helpers shared by the top-k kernels."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.parts.xla.total_order import to_ordered


def in_order(x: jax.Array) -> jax.Array:
    """Maps floats to int32 in the same order: -0 equals +0, and nan is above all other numbers."""
    order = to_ordered(x).astype(jnp.int32)
    return jnp.where(order == -1, jnp.int32(0), order)  # -0 maps to -1, next to +0


def numbers_at(x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the numbers of rows (T, E) at indices (T, number), in float32."""
    row = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    # A separate loop: XLA:CPU miscompiles some loops that gather single elements along with their indices.
    at = isolate(row, places)
    numbers = x.astype(jnp.float32).at[at].get(unique_indices=True, mode="promise_in_bounds")
    return isolate(numbers)[0]
