"""Storing keys and values in a cache of 8 bits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bijax.ops.kv_cache.store import quantise
from bijax.ops.rotary.heads import store_rows


def rotate_and_store_in_8_bits(
    rotate: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    heads: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    rows: jax.Array,
    caches: tuple[jax.Array, jax.Array],
    to_rotate: jax.Array | None,
    scales: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Ops.rotate_and_store` with a cache of 8 bits, by `rotate` (x, cos, sin)."""
    rotated = heads.shape[2] - caches[0].shape[2]
    query_heads = rotated - caches[0].shape[2]
    both = rotate(heads[:, :, :rotated] if to_rotate is None else to_rotate, *angles)
    stored, possible = [], jnp.ones(rows.shape, bool)
    new = both[:, :, query_heads:], heads[:, :, rotated:]
    for cache, numbers, scale in zip(caches, new, scales, strict=True):
        flat = numbers.reshape(rows.size, *numbers.shape[2:])
        quantised, finite = quantise("rotate_and_store", flat, scale, cache.dtype)
        possible &= finite
        stored.append(store_rows(cache, rows, quantised))
    query = jnp.where(possible.reshape(*heads.shape[:2], 1, 1), both[:, :, :query_heads], jnp.nan)
    return query, stored[0], stored[1]
