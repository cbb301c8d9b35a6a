"""The loop of at most 8 rows over 8-bit key blocks, by several warpgroups: some weigh keys, others add their values.

Where there are fewer items than multiprocessors, the time of a block counts. Two warpgroups that weigh keys take blocks
in turn: only the largest score so far goes from one to the other. The sums are those of `ByteKeyLoop`.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
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


class PartShared(NamedTuple):
    """Shared memory of the warpgroups, and barriers.

    Attributes:
        narrow: Rounded weights of two alternating blocks, (2, 8, 128).
        wide: Weights of the same, (2, n).
        numbers: For reductions over keys: of totals, and of maxima for each warpgroup that weighs.
        stats: (2, 2, 8) float32, of each block the decay of what was summed before, and the largest score so far.
        scaled: Barriers of queries that have been multiplied by the scales of their keys.
        known: Barriers of blocks whose `stats` have been written.
        ready: The same of weights.
        taken: Barriers of blocks whose values have been added.
    """

    narrow: Any
    wide: Any
    numbers: Any
    stats: Any
    scaled: Any
    known: Any
    ready: Any
    taken: Any

    @classmethod
    def types(cls, dtype: Any, weigh: int, add: int) -> "PartShared":
        """Returns the types for weights of a dtype, which `weigh` warpgroups write and `add` of them read."""
        narrow, wide, numbers = scratch(dtype)
        return cls(
            narrow,
            plgpu.SMEM((_BUFFERS, *wide.shape), wide.dtype),
            plgpu.SMEM((weigh + 1, *numbers.shape[1:]), numbers.dtype),
            plgpu.SMEM((_BUFFERS, 2, COLUMNS), jnp.float32),
            scaled=plgpu.Barrier(num_barriers=2),
            known=plgpu.Barrier(num_barriers=_BUFFERS),
            ready=plgpu.Barrier(num_barriers=_BUFFERS),
            taken=plgpu.Barrier(num_arrivals=add, num_barriers=_BUFFERS),
        )

    def drain(self, weighed: Any, part: int, parts: int) -> None:
        """Waits until the values of the last of `weighed` blocks have been added, by the part that weighed them."""
        if parts == 1:
            drain((self.taken,), _BUFFERS, weighed)
        else:
            pl.when(weighed > part)(lambda: plgpu.barrier_wait(self.taken.at[part]))


@dataclass(frozen=True)
class PartKeyLoop(ByteKeyLoop):
    """A `ByteKeyLoop` whose `shared` is a `PartShared`: some warpgroups call `weigh_keys`, others `add_values`."""

    def weigh_keys(self, part: int, parts: int) -> None:
        """Shares the weights of blocks: of all, at least one, or of those whose turn in the pipeline it is."""
        if parts == 1:
            self._weigh_all()
            return
        first, last = self.blocks.first, self.blocks.last
        own = first + lax.rem(part + parts - lax.rem(self.position, parts), parts)

        @pl.loop(0, lax.div(jnp.maximum(last - own, 0) + (parts - 1), parts))
        def _(turn: Any) -> None:
            block = own + turn * parts
            scores = self._masked(self._finish_scores(self._start_scores(block), 0, block), block)
            found = largest(scores, self.shared.numbers.at[part + 1], self.interpret) * self.factor
            place = self._place(block)
            before = lax.rem(place + (_BUFFERS - 1), _BUFFERS)

            @pl.when(place > 0)
            def _() -> None:
                plgpu.barrier_wait(self.shared.known.at[before])

            known = load_columns(self.shared.stats.at[before, 1], self.interpret)
            known = jnp.where(jnp.full(known.shape, block == first), filled_columns(LEAST), known)
            self._share(scores, found, known, block, tell=True)

    def _weigh_all(self) -> None:
        """Shares the weights of all blocks, each while the scores of the next are multiplied."""
        first, last, numbers = self.blocks.first, self.blocks.last, self.shared.numbers.at[1]

        def share(scores: Tile, before: jax.Array, block: Any) -> jax.Array:
            return self._share(
                scores, largest(scores, numbers, self.interpret) * self.factor, before, block, tell=False
            )

        def one(block: Any, carry: tuple[Tile, jax.Array]) -> tuple[Tile, jax.Array]:
            started = self._start_scores(block)
            maximum = share(*carry, block - 1)
            return self._masked(self._finish_scores(started, 0, block), block), maximum

        scores = self._masked(self._finish_scores(self._start_scores(first), 0, first), first)
        scores, maximum = lax.fori_loop(first + 1, last, one, (scores, filled_columns(LEAST)))
        share(scores, maximum, last - 1)

    def _share(self, scores: Tile, found: jax.Array, before: jax.Array, block: Any, *, tell: bool) -> jax.Array:
        """Shares the weights of a block, and returns the largest score so far, (8,).

        Args:
            scores: The scores of the block.
            found: Largest of them, times the factor.
            before: Largest score so far.
            block: The block.
            tell: Whether another warpgroup waits for the largest score.
        """
        maximum = jnp.maximum(before, found)
        buffer = lax.rem(self._place(block), _BUFFERS)
        await_free(self._place(block), _BUFFERS, self.shared.taken.at[buffer])
        for i, numbers in enumerate((self.math.exp2(before - maximum), maximum)):
            share_columns(numbers, self.shared.stats.at[buffer, i], self.interpret)
        if tell:
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.shared.known.at[buffer])
        low, high = (self.math.exp2(self.math.fused(x, self.factor, down(-maximum))) for x in scores)
        share_transposed((low, high), self.shared.narrow.at[buffer], self.shared.wide.at[buffer], self.interpret)
        plgpu.barrier_arrive(self.shared.ready.at[buffer])
        return maximum

    def add_values(self, tiles: range) -> tuple[tuple[jax.Array, ...], Stats]:
        """Adds the values of all blocks, at least one; returns what `run` does, for some tiles of columns."""
        values = tuple(filled((ROWS, COLUMNS), 0) for _ in tiles)
        stats = Stats(filled_columns(0), of_lanes(filled_columns(0), self.interpret))

        def add(block: Any, state: tuple[tuple[jax.Array, ...], Stats]) -> tuple[tuple[jax.Array, ...], Stats]:
            return self._add_block(block, *state, tiles)

        values, stats = lax.fori_loop(self.blocks.first, self.blocks.last, add, (values, stats))
        if 0 not in tiles:
            return values, stats
        total = add_lanes_of_columns(stats.total, self.shared.numbers.at[0], self.interpret)
        return values, Stats(stats.maximum, total)

    def _add_block(
        self, block: Any, values: tuple[jax.Array, ...], stats: Stats, tiles: range
    ) -> tuple[tuple[jax.Array, ...], Stats]:
        slot, stored = self._slot(block), self.ring.values
        buffer = lax.rem(self._place(block), _BUFFERS)
        narrow, wide = self.shared.narrow.at[buffer], self.shared.wide.at[buffer]
        plgpu.barrier_wait(stored.full.at[slot])
        rows: tuple[jax.Array, ...] = ()
        if not self.interpret:
            rows = widened_values(stored.stored.at[slot], tiles, narrow.dtype, self.ring.fp8)
        plgpu.barrier_wait(self.shared.ready.at[buffer])
        decay, maximum = (load_columns(self.shared.stats.at[buffer, i], self.interpret) for i in range(2))
        totals = tuple(self.math.product(x, down(decay)) for x in values)
        if self.interpret:
            columns = stored.stored.at[slot, :, pl.ds(tiles[0] * ROWS, len(tiles) * ROWS)]
            found = start_values(totals, columns, narrow, self.ring.fp8, True)
        else:
            found = tuple(
                start(total, row, (narrow,), interpret=False) for total, row in zip(totals, rows, strict=True)
            )
        total = stats.total
        if 0 in tiles:
            total = add_rows_to_lanes(total, of_lanes(decay, self.interpret), wide, self.interpret)
            if self.ring.fp8:
                total = self._poisoned(total, block)
        found = finish(0, *found, interpret=self.interpret)
        plgpu.commit_smem()  # every warp has read
        plgpu.barrier_arrive(stored.free.at[slot])
        plgpu.barrier_arrive(self.shared.taken.at[buffer])
        return found, Stats(maximum, total)
