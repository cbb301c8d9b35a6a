"""Products of groups of rows without any element to multiply."""

from typing import Any

import jax
import jax.numpy as jnp


def empty_sums(sizes: jax.Array, m: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros, or nan if sizes (G,) are negative or add up to more than `m`.

    Example:
        >>> empty_sums(jnp.array([1, 3]), 4, (2,), "float32").tolist(), empty_sums(jnp.array([5]), 4, (1,), "float32")
        ([0.0, 0.0], Array([nan], dtype=float32))
    """
    fit = jnp.all(sizes >= 0) & (jnp.sum(jnp.clip(sizes, 0, m + 1)) <= m)
    return jnp.broadcast_to(jnp.where(fit, 0, jnp.nan).astype(dtype), shape)
