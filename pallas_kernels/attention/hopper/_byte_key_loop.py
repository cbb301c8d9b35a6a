"""The loop of at most 8 rows over 8-bit key blocks: bytes become wgmma's rows in registers.

The sums equal those of `SwappedKeyLoop`. A warpgroup waits for its scores before it widens values to 16 bits, so that
they share registers; meanwhile another one computes on its own blocks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._byte_ring import Bytes
from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._mask_bounds import Blocks
from pallas_kernels.attention.hopper._online import Stats
from pallas_kernels.attention.hopper._swapped_key_loop import State, SwappedKeyLoop
from pallas_kernels.attention.hopper.bytes_left import start_keys, start_values
from pallas_kernels.attention.hopper.columns import Tile, add_rows_to_lanes, down, of_lanes
from pallas_kernels.attention.hopper.zero_fill import WORD
from pallas_kernels.attention.hopper.zero_fill_bytes import zero_fill_bytes
from pallas_kernels.parts.hopper.products import finish
from pallas_kernels.parts.hopper.stages import await_free, drain
from pallas_kernels.parts.hopper.tile import tiled


class LeftStages(NamedTuple):
    """Shared memory and barriers of the stages of all workers: the attributes of `LeftRing` of these names."""

    keys: Bytes
    values: Bytes
    found: Any

    @classmethod
    def types(cls, workers: int, stages: int, source: KeySource, size: int, value_size: int) -> "LeftStages":
        """Returns the types."""
        every = workers * stages
        keys, values = (
            Bytes(
                stored=plgpu.SMEM((every, source.block, width), jnp.int8, transforms=tiled(jnp.int8, width)),
                full=plgpu.Barrier(num_arrivals=source.copies, num_barriers=every + more * workers),
                free=plgpu.Barrier(num_barriers=every),
            )
            for more, width in enumerate((size, value_size))
        )
        return cls(keys, values, plgpu.SMEM((every, source.block // WORD), jnp.int32))


@dataclass(frozen=True)
class LeftRing:
    """Stages of bytes that one warpgroup fills and another one multiplies.

    All workers of a block of the grid run one program: two copies of it do not fit into the instruction cache.

    Attributes:
        worker: Index of the worker, whose stages follow those of the previous workers.
        workers: Number of workers.
        stages: Number of stages of keys and of values of each.
        source: Source of the blocks.
        fp8: Whether bytes are float8_e4m3fn; else int8.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        keys: Stages of keys.
        values: Stages of values; one more barrier per worker for values to be zero-filled.
        found: (workers * stages, block / 32) int32, as in `Ring`.
    """

    worker: Any
    workers: int
    stages: int
    source: KeySource
    fp8: bool
    interpret: bool
    keys: Bytes
    values: Bytes
    found: Any

    def slot(self, position: Any) -> Any:
        """Returns the stage of a position."""
        return self.worker * self.stages + lax.rem(position, self.stages)

    @property
    def apart(self) -> Any:
        """Index of the barrier for values to be zero-filled."""
        return self.workers * self.stages + self.worker

    def fill(
        self,
        blocks: Blocks,
        position: Any,
        caches: tuple[Any, Any],
        table: Any,
        sequence: Any,
        head: Any,
    ) -> None:
        """Fills stages with the blocks of a tile; arguments as for `Ring.fill`. Integers need no zero-filling."""

        @pl.loop(blocks.first, blocks.last)
        def _(block: Any) -> None:
            at, start, in_part = position + (block - blocks.first), block * self.source.block, blocks.in_part(block)
            slot, pages = self.slot(at), self.source.pages(table, sequence, block)
            values_there = jnp.where(in_part, self.apart, slot) if self.fp8 else slot
            there = self.keys.full.at[slot], self.values.full.at[values_there]
            for cache, stages, full in zip(caches, (self.keys, self.values), there, strict=True):
                await_free(at, self.stages, stages.free.at[slot])
                self.source.copy(cache, pages, stages.stored.at[slot], full, sequence, block, head)

            if not self.fp8:
                return

            @pl.when(in_part)
            def _() -> None:
                plgpu.barrier_wait(self.values.full.at[self.apart])
                ends, found = (blocks.start - start, blocks.end - start), self.found.at[slot]
                zero_fill_bytes(self.values.stored.at[slot], *ends, found, self.interpret)
                plgpu.commit_smem()
                for _ in range(self.source.copies):
                    plgpu.barrier_arrive(self.values.full.at[slot])

    def drain(self, filled: Any) -> None:
        """Waits until the stages filled last are free."""
        drain((self.keys.free, self.values.free), self.stages, filled, self.slot)


@dataclass(frozen=True)
class ByteKeyLoop(SwappedKeyLoop):
    """A `SwappedKeyLoop` whose `ring` is a `LeftRing`."""

    @property
    def width(self) -> int:
        """Columns of the values."""
        return self.ring.values.stored.shape[2]

    def _block(self, block: Any, state: State) -> State:
        """Processes a block's scores and the previous block's values."""
        scores = self._finish_scores(self._start_scores(block), 0, block)
        values, stats = self._start_values(block - 1, state)
        maximum, decay = self._weigh(self._masked(scores, block), stats.maximum, block)
        return State(self._finish_values(block - 1, values), Stats(maximum, stats.total), decay)

    def _start_scores(self, block: Any) -> Tile:
        slot, keys = self._slot(block), self.ring.keys
        plgpu.barrier_wait(keys.full.at[slot])
        return start_keys(keys.stored.at[slot], self.queries, self.ring.fp8, self.interpret)

    def _finish_scores(self, scores: Tile, after: int, block: Any) -> Tile:
        low, high = finish(after, *scores, interpret=self.interpret)
        plgpu.commit_smem()  # every warp has read
        plgpu.barrier_arrive(self.ring.keys.free.at[self._slot(block)])
        pl.when(block + 1 == self.blocks.last)(self.after_scores)
        return low, high

    def _start_values(self, block: Any, state: State) -> tuple[tuple[jax.Array, ...], Stats]:
        slot, stored = self._slot(block), self.ring.values
        plgpu.barrier_wait(stored.full.at[slot])
        totals = tuple(self.math.product(x, down(state.decay)) for x in state.values)
        values = start_values(
            totals,
            stored.stored.at[slot],
            self._narrow(block),
            self.ring.fp8,
            self.interpret,
        )
        decay = of_lanes(state.decay, self.interpret)
        total = add_rows_to_lanes(state.stats.total, decay, self.shared.wide, self.interpret)
        return values, Stats(state.stats.maximum, self._poisoned(total, block) if self.ring.fp8 else total)

    def _finish_values(self, block: Any, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values = finish(0, *values, interpret=self.interpret)
        plgpu.commit_smem()  # every warp has read
        plgpu.barrier_arrive(self.ring.values.free.at[self._slot(block)])
        return values
