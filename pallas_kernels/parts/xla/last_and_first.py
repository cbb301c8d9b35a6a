"""The rows of places, found by one scatter."""

import jax
import jax.numpy as jnp

from pallas_kernels.parts.no_row import BEFORE_ALL


def last_and_first_rows(offset: jax.Array, *, places: int) -> jax.Array:
    """Returns the number of the last row of each place, and the negative of that of the first one.

    Args:
        offset: (A,) int32, the place of each row, negative for unused rows.
        places: Number of places.

    Returns:
        (places + 1, 2) int32, `BEFORE_ALL` for a place without rows. The last one is a place for all offsets after
        those of all places.

    Example:
        >>> last_and_first_rows(jnp.array([2, -1, 0, 2]), places=3)[:, 0].tolist() == [2, BEFORE_ALL, 3, BEFORE_ALL]
        True
    """
    slots = jnp.where(offset >= 0, jnp.minimum(offset, places), places + 1)
    number = jnp.arange(offset.size, dtype=jnp.int32)
    found = jnp.full((places + 1, 2), BEFORE_ALL, jnp.int32)
    return found.at[slots].max(jnp.stack([number, -number], 1), mode="drop")
