"""The key/value cache of a model, contiguous or in pages."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bijax.ops.rotate_heads import store_rows


class LayerCache(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        keys: (B, capacity, K, H), or (pages, page size, K, H) with a page table.
        values: The same.
        page_table: (B, pages per sequence) int32: page i of a sequence holds its positions from i * page size on. None
            for a contiguous cache.
        common_prefix: () int32, tokens that all sequences begin with, in the same pages; None where that is not known.
        scales: Of the keys and of the values, (K, H) or (K,) each, in a cache of 8 bits; None in others.

    Example:
        >>> cache = LayerCache(jnp.zeros((1, 4, 1, 1)), jnp.zeros((1, 4, 1, 1)))
        >>> new = jnp.array([5.0, 6.0]).reshape(1, 2, 1, 1)
        >>> cache.write(new, new, jnp.array([1]), jnp.array([2])).keys.ravel().tolist()
        [0.0, 5.0, 6.0, 0.0]
    """

    keys: jax.Array
    values: jax.Array
    page_table: jax.Array | None = None
    common_prefix: jax.Array | None = None
    scales: tuple[jax.Array, jax.Array] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that each sequence can hold."""
        return self.keys.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    def write(self, keys: jax.Array, values: jax.Array, start: jax.Array, lengths: jax.Array) -> "LayerCache":
        """Returns the cache with new tokens.

        Args:
            keys: (B, T, K, H), the first lengths[b] of each sequence are written.
            values: The same.
            start: (B,) integers, position of the first new token of each sequence.
            lengths: (B,) integers from 0 to T, new tokens of each sequence. What does not fit is not written.
        """
        rows = self.rows(keys.shape[1], start, lengths)
        return self._replace(keys=store_rows(self.keys, rows, keys), values=store_rows(self.values, rows, values))

    def rows(self, length: int, start: jax.Array, lengths: jax.Array) -> jax.Array:
        """Returns the rows of new tokens in the flattened cache.

        Args:
            length: Length T of the padded sequences.
            start: (B,) integers, position of the first new token of each sequence.
            lengths: (B,) integers from 0 to T, new tokens of each sequence.

        Returns:
            (B * T,) integers. Padding, and tokens that do not fit, get a row past the end.
        """
        offsets = jnp.arange(length, dtype=start.dtype)
        positions = start[:, None] + offsets
        if self.page_table is None:
            rows = jnp.arange(len(start))[:, None] * self.capacity + positions
        else:
            page_size = self.keys.shape[1]
            page = jnp.take_along_axis(self.page_table, positions // page_size, axis=1)
            rows = page * page_size + positions % page_size
        outside = self.keys.shape[0] * self.keys.shape[1]
        rows = jnp.where((offsets < lengths[:, None]) & (positions < self.capacity), rows, outside)
        return rows.reshape(len(start) * length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, and the number of tokens of each sequence.

    A pytree. Make one with `contiguous` or `paged`; a model's `extend` returns the next.

    Attributes:
        keys: For each layer (B, capacity, K, H), or (pages, page size, K, H) with a page table.
        values: The same.
        lengths: (B,) int32, tokens held by each sequence. Array elements past them are never read, so setting a smaller
            length with `dataclasses.replace` removes tokens.
        page_table: (B, pages per sequence) int32, or None. Sequences may share pages if none of them writes to these.

    Example:
        >>> cache = KVCache.contiguous(batch=2, capacity=8, num_layers=1, num_kv_heads=1, head_dim=4)
        >>> cache.batch, cache.capacity, cache.lengths.tolist()
        (2, 8, [0, 0])
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array
    page_table: jax.Array | None = None

    @classmethod
    def contiguous(
        cls,
        *,
        batch: int,
        capacity: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.float32,
    ) -> "KVCache":
        """Returns an empty cache with room for `capacity` tokens of each sequence.

        Raises:
            ValueError: If a size is negative.
        """
        return cls._empty(num_layers, (batch, capacity, num_kv_heads, head_dim), dtype, batch, None)

    @classmethod
    def paged(
        cls,
        page_table: Any,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.float32,
    ) -> "KVCache":
        """Returns an empty cache of pages.

        Args:
            page_table: (B, pages per sequence) integers: the pages of each sequence, in the order of its tokens.
            num_pages: Pages of the cache.
            page_size: Tokens of a page.
            num_layers: Layers of the model.
            num_kv_heads: Key/value heads.
            head_dim: Width of a head.
            dtype: Dtype of keys and values.

        Raises:
            TypeError: If the page table does not hold integers.
            ValueError: If it has another rank or points outside the cache, or if a size is negative.
        """
        table = np.asarray(page_table)
        if not np.issubdtype(table.dtype, np.integer):
            raise TypeError(f"page_table must hold integers, got {table.dtype.name}{table.shape}.")
        if table.ndim != 2:
            raise ValueError(f"page_table must have the shape (sequences, pages of each), got {table.shape}.")
        if table.size and not 0 <= table.min() <= table.max() < num_pages:
            raise ValueError(
                f"page_table must hold pages from 0 to {num_pages - 1}, got pages from {table.min()} to {table.max()};"
                " give the cache more pages or correct the table."
            )
        return cls._empty(
            num_layers,
            (num_pages, page_size, num_kv_heads, head_dim),
            dtype,
            table.shape[0],
            jnp.asarray(table, jnp.int32),
        )

    @classmethod
    def _empty(
        cls, num_layers: int, shape: tuple[int, ...], dtype: Any, batch: int, page_table: jax.Array | None
    ) -> "KVCache":
        if num_layers < 0 or min(shape) < 0:
            raise ValueError(f"the sizes of a cache must not be negative, got {num_layers=} and arrays of {shape}.")
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2))
        return cls(keys, values, jnp.zeros(batch, jnp.int32), page_table)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that each sequence can hold."""
        return self.layer(0).capacity if self.keys else 0

    def layer(self, index: int) -> LayerCache:
        """Returns the cache of one layer."""
        return LayerCache(self.keys[index], self.values[index], self.page_table)
