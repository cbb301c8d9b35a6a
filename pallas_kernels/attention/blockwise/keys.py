"""Reading one block of keys or values at an absolute position, from a contiguous or a paged cache."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.attention.eight_bits import numbers
from pallas_kernels.attention.schedule.cpu import Tile
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate

FetchBlock = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps the first sequence of a tile and the index of a block to (sequences, keys, K, H) float32."""


class Cache(NamedTuple):
    """Keys or values, as they are or in 8 bits.

    Attributes:
        stored: (B, S, K, H), or (P, page, K, H).
        dtype: Dtype of the elements that are attended to.
    """

    stored: jax.Array
    dtype: DTypeLike

    def read(self, block: jax.Array) -> jax.Array:
        """Returns a block (sequences, keys, K, H) of stored elements as they enter the products, in float32."""
        exact = block.astype(jnp.float32) if block.dtype == self.dtype else numbers(block, jnp.float32)
        return isolate(exact)[0]


def contiguous_blocks(cache: Cache, tile: Tile, key_block: int) -> FetchBlock:
    """Returns the reader of a cache (B, S, K, H); positions beyond S read as zeros.

    Nothing else of the cache is copied than the block.

    Args:
        cache: The keys or the values of all sequences.
        tile: Of at most B sequences.
        key_block: Keys of a block.
    """
    _, capacity, heads, size = cache.stored.shape
    held = min(capacity, tile.keys)

    def fetch(first: jax.Array, block: jax.Array) -> jax.Array:
        start = block * key_block
        # XLA moves a slice that reaches over the end back, so it is taken early and its content pushed forward.
        early = jnp.minimum(start, capacity - held)
        zero = jnp.int32(0)
        read = lax.dynamic_slice(
            cache.stored, (first, early, zero, zero), (tile.sequences, held, heads, size), **FROM_ZERO
        )
        if capacity % tile.keys:
            read = lax.pad(read, jnp.zeros((), read.dtype), [(0, 0, 0), (0, tile.keys, 0), (0, 0, 0), (0, 0, 0)])
            read = lax.dynamic_slice_in_dim(read, start - early, tile.keys, axis=1, **FROM_ZERO)
        return cache.read(read)

    return fetch


def paged_blocks(cache: Cache, page_table: jax.Array, tile: Tile, key_block: int) -> FetchBlock:
    """Returns the reader of a paged cache.

    Args:
        cache: (P, page, K, H), the keys or the values of all pages.
        page_table: (B, n) int32, the pages of each sequence in order. What entries outside of [0, P) read is
            arbitrary; the caller sees to it that no query sees their keys.
        tile: Of at most B sequences.
        key_block: Keys of a block.
    """
    number, page, heads, size = cache.stored.shape
    # The largest piece that never lies across the edge of a page or of a block.
    piece = math.gcd(page, key_block)
    pieces = cache.stored.reshape(number * (page // piece), piece, heads, size)

    def fetch(first: jax.Array, block: jax.Array) -> jax.Array:
        table = lax.dynamic_slice_in_dim(page_table, first, tile.sequences, axis=0, **FROM_ZERO)
        start = block * key_block + jnp.arange(0, tile.keys, piece, dtype=jnp.int32)
        # The last block may reach over the end of the table; no query sees what is read there.
        entry = jnp.take(table, start // page, axis=1, mode="clip")
        index = entry * (page // piece) + (start % page) // piece
        read = jnp.take(pieces, index, axis=0, mode="clip")
        return cache.read(read.reshape(tile.sequences, tile.keys, heads, size))

    return fetch
