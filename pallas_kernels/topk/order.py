"""What the kernels for the largest numbers share."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.parts.xla.total_order import to_ordered


def in_order(x: jax.Array) -> jax.Array:
    """Returns int32 numbers in the order of floating ones: -0 and +0 are one number, and a nan is above all others."""
    order = to_ordered(x).astype(jnp.int32)
    return jnp.where(order == -1, jnp.int32(0), order)  # -0 stands next to +0


def numbers_at(x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the numbers of rows (T, E) at places (T, number), in float32."""
    row = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    # A loop of its own: XLA:CPU makes wrong code of some that gather single elements beside their indices.
    at = isolate(row, places)
    numbers = x.astype(jnp.float32).at[at].get(unique_indices=True, mode="promise_in_bounds")
    return isolate(numbers)[0]
