"""Stages of 8-bit keys and values in shared memory, and the warpgroups that make 16 bits of them.

One warpgroup copies bytes, one makes keys of them and one values, in the stages of a `Ring`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._mask_bounds import Blocks
from pallas_kernels.attention.hopper._ring import Ring
from pallas_kernels.attention.hopper.widen import read_bytes, write_widened
from pallas_kernels.attention.hopper.zero_fill import zero_fill_rows
from pallas_kernels.parts.hopper.stages import await_free, drain


class Bytes(NamedTuple):
    """Stages of keys or of values.

    Attributes:
        stored: (stages, block, width of a head) int8.
        full: A barrier for each stage.
        free: The same.
    """

    stored: Any
    full: Any
    free: Any

    @classmethod
    def types(cls, stages: int, source: KeySource, size: int) -> "Bytes":
        """Returns the types of the attributes."""
        return cls(
            stored=plgpu.SMEM((stages, source.block, size), jnp.int8),
            full=plgpu.Barrier(num_arrivals=source.copies, num_barriers=stages),
            free=plgpu.Barrier(num_barriers=stages),
        )


@dataclass(frozen=True)
class ByteRing:
    """Stages of bytes, filled in the order of the blocks.

    Attributes:
        stages: Number of stages of keys and of values.
        source: Source of the blocks.
        fp8: Whether bytes are float8_e4m3fn; else int8.
        keys: Stages of keys.
        values: Stages of values.
    """

    stages: int
    source: KeySource
    fp8: bool
    keys: Bytes
    values: Bytes

    def slot(self, position: Any) -> Any:
        """Returns the stage of a position."""
        return lax.rem(position, self.stages)

    def fill(
        self, blocks: Blocks, position: Any, caches: tuple[Any, Any], table: Any, sequence: Any, head: Any
    ) -> None:
        """Fills stages with the blocks of a tile; arguments as for `Ring.fill`."""

        @pl.loop(blocks.first, blocks.last)
        def _(block: Any) -> None:
            at = position + (block - blocks.first)
            slot, pages = self.slot(at), self.source.pages(table, sequence, block)
            for cache, stages in zip(caches, (self.keys, self.values), strict=True):
                await_free(at, self.stages, stages.free.at[slot])
                target, full = stages.stored.at[slot], stages.full.at[slot]
                self.source.copy(cache, pages, target, full, sequence, block, head)

    def drain(self, filled: Any) -> None:
        """Waits until the stages filled last are free."""
        for stages in (self.keys, self.values):
            drain((stages.free,), self.stages, filled)

    def widen_keys(self, blocks: Blocks, position: Any, ring: Ring) -> None:
        """Makes keys of the blocks of a tile."""

        @pl.loop(blocks.first, blocks.last)
        def _(block: Any) -> None:
            at = position + (block - blocks.first)
            slot = ring.slot(at)
            self._widen(self.keys, at, ring.keys.at[slot], ring.keys_free.at[slot], ring)
            plgpu.barrier_arrive(ring.keys_full.at[slot])

    def widen_values(self, blocks: Blocks, position: Any, ring: Ring) -> None:
        """Makes values of the blocks of a tile; cleans them as `Ring.fill` does."""

        @pl.loop(blocks.first, blocks.last)
        def _(block: Any) -> None:
            at, start = position + (block - blocks.first), block * self.source.block
            slot = ring.slot(at)
            self._widen(self.values, at, ring.values.at[slot], ring.values_free.at[slot], ring)

            @pl.when(blocks.in_part(block))
            def _() -> None:
                ends = blocks.start - start, blocks.end - start
                zero_fill_rows(ring.values.at[slot], *ends, ring.found.at[slot], ring.interpret)
                plgpu.commit_smem()

            plgpu.barrier_arrive(ring.values_full.at[slot])

    def _widen(self, stages: Bytes, at: Any, target: Any, free: Any, ring: Ring) -> None:
        """Takes bytes into registers, gives their stage back, and writes 16 bits when `target` is free."""
        slot = self.slot(at)
        plgpu.barrier_wait(stages.full.at[slot])
        numbers = read_bytes(stages.stored.at[slot], ring.interpret)
        plgpu.commit_smem()  # every warp has read
        plgpu.barrier_arrive(stages.free.at[slot])
        await_free(at, ring.stages, free)
        write_widened(numbers, target, self.fp8, ring.interpret)
        plgpu.commit_smem()  # every warp has written
