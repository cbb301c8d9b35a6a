"""Fill values of rows without a valid row index."""

import jax
import jax.numpy as jnp

from pallas_kernels.parts.no_row import WRONG


def filled(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Returns the rows, replaced by nan where the place is `WRONG` and by zeros where there is no row."""
    zero = jnp.zeros((), rows.dtype)
    wrong = jnp.array(jnp.nan, rows.dtype) if jnp.issubdtype(rows.dtype, jnp.floating) else zero
    return jnp.where(place >= 0, rows, jnp.where(place == WRONG, wrong, zero))
