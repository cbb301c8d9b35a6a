"""Where blocks of keys and values come from: a contiguous cache, or pages listed in a table."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.outside import any_outside

Pages = tuple[jax.Array, ...]
"""The pages of a block, int32 each; none for a contiguous cache."""


@dataclass(frozen=True)
class KeySource:
    """A cache in GPU memory.

    Attributes:
        block: Keys of a block.
        page: Keys of a page, which divides a block or is a multiple of it; None for a contiguous cache (B, S, K, H).
        count: Pages of the cache.
    """

    block: int
    page: int | None = None
    count: int = 0

    @property
    def copies(self) -> int:
        """Copies of a block."""
        return 1 if self.page is None else max(1, self.block // self.page)

    def pages(self, table: Any, sequence: Any, index: Any) -> Pages:
        """Returns the pages of a block, which may lie after the end of the table; no query sees what is read there.

        Pages outside of the cache become others: no memory outside is touched; see `leads_outside`.

        Args:
            table: (B, n) int32, or None.
            sequence: Index of the sequence.
            index: Index of the block in the sequence.
        """
        if self.page is None:
            return ()
        first = lax.div(index, self.page // self.block) if self.page >= self.block else index * self.copies
        found = (table[sequence, jnp.minimum(first + i, table.shape[1] - 1)] for i in range(self.copies))
        return tuple(jnp.clip(page, 0, self.count - 1) for page in found)

    def leads_outside(self, table: Any, sequence: Any, keys: Any, interpret: bool) -> jax.Array:
        """Returns whether an entry that holds keys of a sequence is no page of the cache.

        Args:
            table: (B, n) int32.
            sequence: Index of the sequence.
            keys: Keys of the sequence.
            interpret: Whether the kernel runs in Mosaic's interpreter.
        """
        if self.page is None:
            raise ValueError("expected pages, got a contiguous cache.")
        entries = jnp.minimum(lax.div(keys + (self.page - 1), self.page), table.shape[1])
        return any_outside(table, sequence, entries, self.count, interpret)

    def copy(self, cache: Any, pages: Pages, target: Any, barrier: Any, sequence: Any, index: Any, head: Any) -> None:
        """Starts the copies of a block into shared memory (block, H), which arrive at `barrier`.

        Args:
            cache: (B, S, K, H), or (P, page, K, H) with pages.
            pages: Of the block.
            target: Shared memory.
            barrier: Expects `copies` arrivals.
            sequence: Index of the sequence.
            index: Index of the block in the sequence.
            head: Index of the key head.
        """
        if self.page is None:
            plgpu.copy_gmem_to_smem(cache.at[sequence, pl.ds(index * self.block, self.block), head], target, barrier)
        elif self.page >= self.block:
            start = lax.rem(index, self.page // self.block) * self.block
            plgpu.copy_gmem_to_smem(cache.at[pages[0], pl.ds(start, self.block), head], target, barrier)
        else:
            for i, page in enumerate(pages):
                part = target.at[pl.ds(i * self.page, self.page)]
                plgpu.copy_gmem_to_smem(cache.at[page, :, head], part, barrier)
