"""8-bit keys and values, and what their factors are multiplied into: see `EightBitContract`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import eight_bit_contract


def numbers(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers of 8 bits as they enter the products: exactly, in units of the contract.

    Args:
        x: int8 or float8_e4m3fn.
        dtype: float32, bfloat16 or float16.
    """
    return (x.astype(jnp.float32) * jnp.float32(eight_bit_contract(x.dtype.name).unit)).astype(dtype)


def scaled_queries(query: jax.Array, factors: jax.Array, stored: Any) -> jax.Array:
    """Returns queries times the factors of their keys.

    Args:
        query: (B, T, N, H) float32, bfloat16 or float16.
        factors: (B or 1, K, H or 1) floats, K a divisor of N.
        stored: Dtype of the keys.
    """
    return _times(query, factors, stored)


def scaled_results(out: jax.Array, factors: jax.Array, stored: Any) -> jax.Array:
    """Returns results (B, T, N, V), rounded, times the factors (B or 1, K, V or 1) of their values, rounded again."""
    return _times(out, factors, stored)


def _times(x: jax.Array, factors: jax.Array, stored: Any) -> jax.Array:
    sequences, heads, size = factors.shape
    whole = factors.astype(jnp.float32) * jnp.float32(1 / eight_bit_contract(jnp.dtype(stored).name).unit)
    whole = whole.reshape(sequences, 1, heads, 1, size)
    grouped = x.reshape(*x.shape[:2], heads, -1, x.shape[3]).astype(jnp.float32)
    return (grouped * whole).astype(x.dtype).reshape(x.shape)
