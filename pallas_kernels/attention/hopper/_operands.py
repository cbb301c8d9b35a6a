"""The arrays of a call as the kernels of the forward pass take them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.eight_bits import numbers, scaled_queries
from pallas_kernels.attention.pages import pages_inside

_ROWS: Final = 8  # TMA reads tiles of so many rows


def readable(call: AttentionCall, block: int, *, packed: bool) -> AttentionCall:
    """Returns a call whose keys and values blocks can be copied from.

    Args:
        call: The call.
        block: Keys of a block.
        packed: Whether the kernel for a few queries runs; it packs queries itself and reads 8-bit keys. The one for
            many reads 16 bits: as many queries read the cache, it is cheap to make them once.
    """
    copies = call.key_scale is not None and not packed
    if call.page_table is not None and (copies or not in_whole_rows(call.key.shape[1], block)):
        call = gathered(call)
    if copies and call.key_scale is not None:
        query = scaled_queries(call.query, call.key_scale, call.key.dtype)
        key, value = (numbers(x, query.dtype) for x in (call.key, call.values))
        call = replace(call, query=query, key=key, value=value, key_scale=None)
    if call.page_table is None:
        call = replace(call, key=padded(call.key), value=padded(call.values))
    return call if packed else replace(call, query=padded(call.query))


def in_whole_rows(page: int, block: int) -> bool:
    """Returns whether blocks of keys can be copied from pages of a size."""
    return page % _ROWS == 0 and (block % page == 0 or page % block == 0)


def gathered(call: AttentionCall) -> AttentionCall:
    """Returns a call of pages with contiguous caches, its sequences with pages outside of the cache marked."""
    table: Any = call.page_table
    limits, value = jnp.asarray(call.limits, jnp.int32), call.value
    inside = pages_inside(table, limits[:, 2], call.key.shape[1], call.key.shape[0])
    limits = jnp.stack([limits[:, 0], jnp.where(inside, limits[:, 1], -1), limits[:, 2]], axis=1)
    if value is not None:
        value = _gathered(value, table)
    return replace(call, key=_gathered(call.key, table), value=value, limits=limits, page_table=None)


def with_whole_factors(call: AttentionCall) -> AttentionCall:
    """Returns a call of 8 bits with factors for each column of a head, float32."""
    found: dict[str, Any] = {}
    for name, cache in (("key_scale", call.key), ("value_scale", call.values)):
        factors = getattr(call, name).astype(jnp.float32)
        found[name] = jnp.broadcast_to(factors, (*factors.shape[:2], cache.shape[3]))
    return replace(call, **found)


def one_by_one(
    attend: Callable[[AttentionCall], tuple[jax.Array, jax.Array]], call: AttentionCall
) -> tuple[jax.Array, jax.Array]:
    """Attends for one sequence after the other, so that a copy of one cache exists at a time."""

    def one(sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = attend(call.sequence(sequence))
        return out[0], lse[0]

    return lax.map(one, jnp.arange(call.query.shape[0], dtype=jnp.int32))


def padded(x: jax.Array) -> jax.Array:
    """Returns (B, S, ...) with S rounded up to the rows of a tile."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % _ROWS), *[(0, 0)] * (x.ndim - 2)])


def _gathered(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Returns a contiguous cache (B, n * page, K, H): pages of sizes that blocks cannot be copied from."""
    found = jnp.take(pages, table, axis=0, mode="clip")
    return found.reshape(table.shape[0], -1, *pages.shape[2:])
