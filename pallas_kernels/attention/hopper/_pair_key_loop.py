"""The loop of at most 8 rows over 8-bit key blocks, by two warpgroups: one weighs keys, the other adds their values.

Where there are fewer items than multiprocessors, the time of a block counts, which is half of that of a `ByteKeyLoop`.
The sums are the same.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._byte_key_loop import ByteKeyLoop
from pallas_kernels.attention.hopper._online import Stats
from pallas_kernels.attention.hopper.bytes_left import start_values, widened_values
from pallas_kernels.attention.hopper.columns import (
    COLUMNS,
    Tile,
    add_lanes_of_columns,
    add_rows_to_lanes,
    down,
    filled_columns,
    largest,
    load_columns,
    of_lanes,
    scratch,
    share_columns,
    share_transposed,
)
from pallas_kernels.contract import LEAST
from pallas_kernels.parts.hopper.products import finish, start
from pallas_kernels.parts.hopper.stages import await_free, drain
from pallas_kernels.parts.hopper.tile import ROWS, filled

_BUFFERS: Final = 2


class PairShared(NamedTuple):
    """Shared memory of the two warpgroups, and barriers.

    Attributes:
        narrow: Rounded weights of two alternating blocks, (2, 8, 128).
        wide: Weights of the same, (2, n).
        numbers: For reductions over keys: of maxima, and of totals.
        stats: (2, 2, 8) float32, of each block the decay of what was summed before, and the largest score so far.
        ready: Barriers of blocks that have been weighed.
        taken: Barriers of blocks whose values have been added.
    """

    narrow: Any
    wide: Any
    numbers: Any
    stats: Any
    ready: Any
    taken: Any

    @classmethod
    def types(cls, dtype: Any) -> "PairShared":
        """Returns the types for weights of a dtype."""
        narrow, wide, numbers = scratch(dtype)
        return cls(
            narrow,
            plgpu.SMEM((_BUFFERS, *wide.shape), wide.dtype),
            numbers,
            plgpu.SMEM((_BUFFERS, 2, COLUMNS), jnp.float32),
            plgpu.Barrier(num_barriers=_BUFFERS),
            plgpu.Barrier(num_barriers=_BUFFERS),
        )

    def drain(self, weighed: Any) -> None:
        """Waits until the values of the last of `weighed` blocks have been added."""
        drain((self.taken,), _BUFFERS, weighed)


@dataclass(frozen=True)
class PairKeyLoop(ByteKeyLoop):
    """A `ByteKeyLoop` whose `shared` is a `PairShared`: one warpgroup calls `weigh_keys`, another `add_values`."""

    def weigh_keys(self) -> None:
        """Shares the weights of all blocks, at least one, each while the scores of the next are multiplied."""
        first, last = self.blocks.first, self.blocks.last

        def one(block: Any, carry: tuple[Tile, jax.Array]) -> tuple[Tile, jax.Array]:
            scores, before = carry
            started = self._start_scores(block)
            maximum = self._share(scores, before, block - 1)
            return self._masked(self._finish_scores(started, 0, block), block), maximum

        scores = self._masked(self._finish_scores(self._start_scores(first), 0, first), first)
        scores, maximum = lax.fori_loop(first + 1, last, one, (scores, filled_columns(LEAST)))
        self._share(scores, maximum, last - 1)

    def _share(self, scores: Tile, before: jax.Array, block: Any) -> jax.Array:
        """Shares the weights of a block, and returns the largest score so far, (8,)."""
        found = largest(scores, self.shared.numbers.at[0], self.interpret)
        maximum = jnp.maximum(before, found * self.factor)
        decay = self.math.exp2(before - maximum)
        low, high = (self.math.exp2(self.math.fused(x, self.factor, down(-maximum))) for x in scores)
        buffer = lax.rem(self._place(block), _BUFFERS)
        await_free(self._place(block), _BUFFERS, self.shared.taken.at[buffer])
        for i, numbers in enumerate((decay, maximum)):
            share_columns(numbers, self.shared.stats.at[buffer, i], self.interpret)
        share_transposed((low, high), self.shared.narrow.at[buffer], self.shared.wide.at[buffer], self.interpret)
        plgpu.barrier_arrive(self.shared.ready.at[buffer])
        return maximum

    def add_values(self) -> tuple[tuple[jax.Array, ...], Stats]:
        """Adds the values of all blocks, at least one; returns what `run` does."""
        values = tuple(filled((ROWS, COLUMNS), 0) for _ in range(self.tiles))
        stats = Stats(filled_columns(0), of_lanes(filled_columns(0), self.interpret))
        values, stats = lax.fori_loop(self.blocks.first, self.blocks.last, self._add_block, (values, stats))
        total = add_lanes_of_columns(stats.total, self.shared.numbers.at[1], self.interpret)
        return values, Stats(stats.maximum, total)

    def _add_block(self, block: Any, state: tuple[tuple[jax.Array, ...], Stats]) -> tuple[tuple[jax.Array, ...], Stats]:
        (values, stats), slot, stored = state, self._slot(block), self.ring.values
        buffer = lax.rem(self._place(block), _BUFFERS)
        narrow, wide = self.shared.narrow.at[buffer], self.shared.wide.at[buffer]
        plgpu.barrier_wait(stored.full.at[slot])
        rows: tuple[jax.Array, ...] = ()
        if not self.interpret:
            rows = widened_values(stored.stored.at[slot], narrow.dtype, self.ring.fp8)
        plgpu.barrier_wait(self.shared.ready.at[buffer])
        decay, maximum = (load_columns(self.shared.stats.at[buffer, i], self.interpret) for i in range(2))
        totals = tuple(self.math.product(x, down(decay)) for x in values)
        if self.interpret:
            found = start_values(totals, stored.stored.at[slot], narrow, self.ring.fp8, True)
        else:
            found = tuple(
                start(total, row, (narrow,), interpret=False) for total, row in zip(totals, rows, strict=True)
            )
        total = add_rows_to_lanes(stats.total, of_lanes(decay, self.interpret), wide, self.interpret)
        if self.ring.fp8:
            total = self._poisoned(total, block)
        found = finish(0, *found, interpret=self.interpret)
        plgpu.commit_smem()  # every warp has read
        plgpu.barrier_arrive(stored.free.at[slot])
        plgpu.barrier_arrive(self.shared.taken.at[buffer])
        return found, Stats(maximum, total)
