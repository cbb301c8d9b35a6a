"""Page tables."""

import jax
import jax.numpy as jnp
from jax import lax


def pages_inside(table: jax.Array, keys: jax.Array, page: int, count: int) -> jax.Array:
    """Returns for which sequences all entries that hold keys are pages of the cache, (B,) bool.

    Args:
        table: (B, n) int32.
        keys: (B,) int32, keys of each sequence.
        page: Keys of a page.
        count: Pages of the cache.
    """
    used = lax.iota(jnp.int32, table.shape[1])[None] * page < keys[:, None]
    return ~jnp.any(used & ((table < 0) | (table >= count)), axis=1)
