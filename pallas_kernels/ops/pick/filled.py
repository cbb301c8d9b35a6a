"""What stands in a row that is picked by no number of a row."""

import jax
import jax.numpy as jnp


def filled(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Returns rows as they are where their place is a row, zeros at -1 and nan at -2."""
    zero = jnp.zeros((), rows.dtype)
    wrong = jnp.array(jnp.nan, rows.dtype) if jnp.issubdtype(rows.dtype, jnp.floating) else zero
    return jnp.where(place >= 0, rows, jnp.where(place == -1, zero, wrong))
