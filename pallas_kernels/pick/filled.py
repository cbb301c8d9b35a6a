"""What stands in a row that is picked by no number of a row."""

import jax
import jax.numpy as jnp

from pallas_kernels.parts.no_row import NO_ROW


def filled(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Returns rows as they are where their place is a row, zeros at `NO_ROW` and nan at `WRONG`."""
    zero = jnp.zeros((), rows.dtype)
    wrong = jnp.array(jnp.nan, rows.dtype) if jnp.issubdtype(rows.dtype, jnp.floating) else zero
    return jnp.where(place >= 0, rows, jnp.where(place == NO_ROW, zero, wrong))
