"""Arrays of JAX that tests make of NumPy's, without a program that XLA would compile."""

from typing import Any

import jax
import numpy as np


def ones(shape: Any, dtype: Any = "float32") -> jax.Array:
    return jax.device_put(np.ones(shape, dtype))


def zeros(shape: Any, dtype: Any = "float32") -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))


def on_device(x: Any, dtype: Any = None) -> jax.Array:
    """Returns what `jnp.asarray` does, which compiles a program for each shape, 10 ms."""
    x = np.asarray(x)
    x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.device_put(x if dtype is None else x.astype(dtype))


def normal(seed: int, shape: tuple[int, ...], dtype: Any = "float32") -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))
