"""Where blocks of keys and values come from: a contiguous cache, or pages listed in a table."""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class KeySource:
    """A cache in GPU memory.

    Attributes:
        block: Keys of a block.
        page: Keys of a page, which divides a block or is a multiple of it; None for a contiguous cache (B, S, K, H).
    """

    block: int
    page: int | None = None

    @property
    def copies(self) -> int:
        """Copies of a block."""
        return 1 if self.page is None else max(1, self.block // self.page)

    def copy(self, cache: Any, table: Any, target: Any, barrier: Any, sequence: Any, index: Any, head: Any) -> None:
        """Starts the copies of a block into shared memory (block, H), which arrive at `barrier`.

        Args:
            cache: (B, S, K, H), or (P, page, K, H) with a table.
            table: (B, n) int32, or None.
            target: Shared memory.
            barrier: Expects `copies` arrivals.
            sequence: Index of the sequence.
            index: Index of the block in the sequence.
            head: Index of the key head.
        """
        if self.page is None:
            plgpu.copy_gmem_to_smem(cache.at[sequence, pl.ds(index * self.block, self.block), head], target, barrier)
            return
        last = table.shape[1] - 1
        if self.page >= self.block:
            blocks = self.page // self.block
            page = table[sequence, jnp.minimum(lax.div(index, blocks), last)]
            start = lax.rem(index, blocks) * self.block
            plgpu.copy_gmem_to_smem(cache.at[page, pl.ds(start, self.block), head], target, barrier)
            return
        for i in range(self.copies):
            # The last block may reach over the end of the table; no query sees what is read there.
            page = table[sequence, jnp.minimum(index * self.copies + i, last)]
            part = target.at[pl.ds(i * self.page, self.page)]
            plgpu.copy_gmem_to_smem(cache.at[page, :, head], part, barrier)
