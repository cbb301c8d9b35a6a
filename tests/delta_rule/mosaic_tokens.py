"""Tokens of the gated delta rule as its kernels for Hopper take them."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_rule.hopper.rows import Tokens


def kernel_tokens(dtype: str, sizes: tuple[int, int, int], count: int, lengths: list[int]) -> Tokens:
    """Random tokens with nan after their ends; keys have length 1."""
    (j, h, d), b, rng = sizes, len(lengths), np.random.default_rng(0)
    query, key = rng.standard_normal((2, b, count, j, d))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    g, beta = -np.abs(rng.standard_normal((b, count, h))) / 9, rng.uniform(0, 1, (b, count, h))
    for i, length in enumerate(lengths):
        for x in (query, key, g, beta):
            x[i, length:] = np.nan
    narrow, wide = (jnp.asarray(x, dtype) for x in (query, key)), (jnp.asarray(x, jnp.float32) for x in (g, beta))
    return Tokens(*narrow, *wide, jnp.asarray(lengths, jnp.int32))
