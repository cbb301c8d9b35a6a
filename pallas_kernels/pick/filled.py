"""Fill values of rows without a valid row index."""

import jax
import jax.numpy as jnp

from pallas_kernels.parts.no_row import NO_ROW


def filled(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Returns the rows, replaced by zeros where the place is `NO_ROW` and by nan where it is `WRONG`."""
    zero = jnp.zeros((), rows.dtype)
    wrong = jnp.array(jnp.nan, rows.dtype) if jnp.issubdtype(rows.dtype, jnp.floating) else zero
    return jnp.where(place >= 0, rows, jnp.where(place == NO_ROW, zero, wrong))
