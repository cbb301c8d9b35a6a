"""Arrays of JAX that modules of tests make when they are collected, without a program that XLA would compile."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ones(shape: Any, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.ones(shape, dtype))


def zeros(shape: Any, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.zeros(shape, dtype))


def normal(seed: int, shape: tuple[int, ...], dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))
