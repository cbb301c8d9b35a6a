"""What a model keeps of sequences: keys and values, contiguous or in pages, and states of linear attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bijax.ops.rotary.heads import store_rows

from .delta_net_state import DeltaNetState

if TYPE_CHECKING:
    # Reading checkpoints needs packages that the cache does not.
    from ...checkpoint import LlamaConfig


class LayerCache(NamedTuple):
    """Keys and values of one layer, or its latents.

    Attributes:
        keys: (B, capacity, K, H), or (pages, page size, K, H) with a page table. Latents are keys of one head.
        values: The same; None for latents, whose first columns are the values.
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
    values: jax.Array | None
    page_table: jax.Array | None = None
    common_prefix: jax.Array | None = None
    scales: tuple[jax.Array, jax.Array] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that each sequence can hold."""
        return self.keys.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    def write(self, keys: jax.Array, values: jax.Array | None, start: jax.Array, lengths: jax.Array) -> LayerCache:
        """Returns the cache with new tokens.

        Args:
            keys: (B, T, K, H), the first lengths[b] of each sequence are written.
            values: The same; None for latents.
            start: (B,) integers, position of the first new token of each sequence.
            lengths: (B,) integers from 0 to T, new tokens of each sequence. What does not fit is not written.

        Raises:
            ValueError: If there are values for a cache of latents, or none for one of keys and values.
        """
        if (self.values is None) != (values is None):
            came = "no values for a cache that has them" if values is None else "values for one that has none"
            raise ValueError(
                "LayerCache: a cache of keys and values is written with both, one of latents without values; got"
                f" {came}."
            )
        rows = self.rows(keys.shape[1], start, lengths)
        written = self._replace(keys=store_rows(self.keys, rows, keys))
        if self.values is None or values is None:
            return written
        return written._replace(values=store_rows(self.values, rows, values))

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
    """Keys and values of all layers, or their states, and the number of tokens of each sequence.

    A pytree. A model's `cache` and `paged_cache` make one; its `extend` returns the next.

    Attributes:
        keys: For each layer that has keys (B, capacity, K, H), or (pages, page size, K, H) with a page table. Latents
            are keys of one head.
        values: The same; None for each layer of latents, whose first columns are the values.
        lengths: (B,) int32, tokens held by each sequence. Array elements past them are never read, so setting a smaller
            length with `dataclasses.replace` removes tokens. With states, no more than 12, and none before a sequence's
            last multiple of 64 (`rule.edge` of its states).
        page_table: (B, pages per sequence) int32, or None. Sequences may share pages if none of them writes to these.
        states: For each layer with linear attention its state.

    Example:
        >>> cache = KVCache.contiguous(batch=2, capacity=8, num_layers=1, num_kv_heads=1, head_dim=4)
        >>> cache.batch, cache.capacity, cache.lengths.tolist()
        (2, 8, [0, 0])
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array | None, ...]
    lengths: jax.Array
    page_table: jax.Array | None = None
    states: tuple[DeltaNetState, ...] = ()

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
        has_values: bool = True,
    ) -> KVCache:
        """Returns an empty cache with room for `capacity` tokens of each sequence; without values for latents.

        Raises:
            ValueError: If a size is negative.
        """
        shape = (batch, capacity, num_kv_heads, head_dim)
        return cls._empty(num_layers, shape, dtype, batch, None, has_values=has_values)

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
        has_values: bool = True,
    ) -> KVCache:
        """Returns an empty cache of pages.

        Args:
            page_table: (B, pages per sequence) integers: the pages of each sequence, in the order of its tokens.
            num_pages: Pages of the cache.
            page_size: Tokens of a page.
            num_layers: Layers of the model.
            num_kv_heads: Key/value heads.
            head_dim: Width of a head.
            dtype: Dtype of keys and values.
            has_values: Whether there are values; False for latents, the keys of one head.

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
            has_values=has_values,
        )

    @classmethod
    def _empty(
        cls,
        num_layers: int,
        shape: tuple[int, ...],
        dtype: Any,
        batch: int,
        page_table: jax.Array | None,
        *,
        has_values: bool,
    ) -> KVCache:
        if num_layers < 0 or min(shape) < 0:
            raise ValueError(f"the sizes of a cache must not be negative, got {num_layers=} and arrays of {shape}.")
        keys = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
        values = tuple(jnp.zeros(shape, dtype) if has_values else None for _ in range(num_layers))
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

    def layers(self, config: LlamaConfig) -> list[LayerCache | DeltaNetState]:
        """Returns what each layer of a model keeps."""
        attention, states = iter(range(len(self.keys))), iter(self.states)
        return [
            next(states) if config.is_linear(layer) else self.layer(next(attention))
            for layer in range(config.num_layers)
        ]

    def with_layers(self, kept: Iterable[LayerCache | DeltaNetState]) -> KVCache:
        """Returns the cache with other contents of its layers, in their order."""
        kept = list(kept)
        attention = [layer for layer in kept if isinstance(layer, LayerCache)]
        return replace(
            self,
            keys=tuple(layer.keys for layer in attention),
            values=tuple(layer.values for layer in attention),
            states=tuple(layer for layer in kept if isinstance(layer, DeltaNetState)),
        )

    def check(self, batch: int, config: LlamaConfig, tokens: jax.Array) -> None:
        """Checks that the cache is one of a model.

        Raises:
            ValueError: If it holds another number of sequences or layers.
        """
        linear = sum(config.is_linear(layer) for layer in range(config.num_layers))
        found = (self.batch, len(self.keys), len(self.states))
        if found != (batch, config.num_layers - linear, linear):
            states = f" and {linear} states" if linear else ""
            raise ValueError(
                f"Llama: the cache must hold {batch} sequences and {config.num_layers - linear} layers{states} for"
                f" tokens of shape {tokens.shape}, got {self.batch} sequences and {len(self.keys)} layers"
                f"{f' and {len(self.states)} states' if self.states or linear else ''}."
            )
