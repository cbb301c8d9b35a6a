"""Operands of the matmul kernels' tests."""

import jax
import jax.numpy as jnp
import numpy as np


def operands(shape: tuple[int, ...], n: int, transpose_w: bool, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(n)
    *lead, _, k = shape
    x, w = rng.standard_normal(shape), rng.standard_normal((*lead, *((n, k) if transpose_w else (k, n))))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)
