"""How a computing warpgroup walks the key blocks of at most 8 rows: keys are wgmma's rows, the rows its columns.

The sums are those of `Walk`, element by element, and a tile of scores takes 8 registers of a thread in place of 64. The
weights pass through shared memory, where wgmma's columns lie. The values of a block are multiplied beside the scores
of the next, and the weights are added beside both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import LEAST
from pallas_kernels.ops.attention.hopper._online import Stats, factor_and_lse, merge_stats
from pallas_kernels.ops.attention.hopper._ring import Ring
from pallas_kernels.ops.attention.hopper._sight import Blocks, Sight
from pallas_kernels.parts.hopper.clean import spoil_rows
from pallas_kernels.parts.hopper.columns import (
    COLUMN,
    COLUMNS,
    Tile,
    add_lanes_of_columns,
    add_rows_to_lanes,
    down,
    filled_columns,
    largest,
    of_lanes,
    share_turned,
)
from pallas_kernels.parts.hopper.products import finish, start
from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, filled


class Shared(NamedTuple):
    """Shared memory of the warpgroup, as `columns.scratch` returns it.

    Attributes:
        narrow: Rounded weights of two blocks in turn, (2, 8, 128).
        wide: Weights of a block.
        numbers: For reductions over rows: of maxima, of totals, and at the end.
    """

    narrow: Any
    wide: Any
    numbers: Any


class State(NamedTuple):
    """What a walk carries from block to block.

    Attributes:
        values: Tiles (64, 8) float32 for each 64 columns of the values, without those of the last block.
        stats: (8,) maxima, and totals as `of_lanes` has them, without the last block's weights.
        decay: (8,) float32, the last block's.
        before: Values, and stats (8,), of all splits before; None if there is one split.
    """

    values: tuple[jax.Array, ...]
    stats: Stats
    decay: jax.Array
    before: "Merged | None"


class Merged(NamedTuple):
    """What some splits give.

    Attributes:
        values: Tiles (64, 8) float32 for each 64 columns of the values.
        stats: (8,) each, lanes added.
    """

    values: tuple[jax.Array, ...]
    stats: Stats


@dataclass(frozen=True)
class SwappedWalk:
    """The walk of a warpgroup over the blocks of one tile, of 128 keys each.

    Attributes:
        split: Blocks of a split; None if all blocks belong to one.
        factor: Factor of the scores.
        sight: How far queries see.
        positions: (8,) int32, the positions of the queries.
        length: Keys of the sequence.
        blocks: The blocks.
        queries: Shared memory (8, H).
        ring: Where the blocks are.
        position: Position in the ring of the first block.
        shared: Further shared memory.
        after_scores: Called when the queries have been read for the last time.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """

    split: int | None
    factor: float
    sight: Sight
    positions: Callable[[], jax.Array]
    length: Any
    blocks: Blocks
    queries: Any
    ring: Ring
    position: Any
    shared: Shared
    after_scores: Callable[[], None]
    interpret: bool

    @property
    def math(self) -> Arithmetic:
        """The instructions."""
        return Arithmetic(interpret=self.interpret, axis=0)

    @property
    def tiles(self) -> int:
        """Tiles of the values."""
        width: int = self.ring.values.shape[2]
        return width // ROWS

    def run(self) -> Merged:
        """Walks all blocks; there is at least one."""
        first, last = self.blocks.first, self.blocks.last
        state = lax.fori_loop(first + 1, last, self._block, self._first())
        values, stats = self._start_values(last - 1, state)
        values = self._finish_values(last - 1, values)
        return self._end_split(values, stats, state.before)

    def result(
        self, found: Merged, valid: jax.Array, sink: jax.Array | None
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Returns the outputs, as tiles, and the log-sum-exp (8,), as `_online.result` does.

        Args:
            found: Of all splits.
            valid: (64, 8) bool; the other columns are no queries.
            sink: (8,) float32 or None.
        """
        zeros = tuple(self.math.scaled(x, 0.0) for x in found.values)
        spoiled = self.math.fused(largest(zeros, self.shared.numbers.at[2], self.interpret), 1.0, 0.0)
        factor, lse = factor_and_lse(found.stats, spoiled, sink, self.math)
        valid = valid & (down(found.stats.total) != 0)
        outs = (self.math.fused(x, down(factor), down(spoiled)) for x in found.values)
        return tuple(jnp.where(valid, x, 0.0) for x in outs), lse

    def _first(self) -> State:
        """Takes the first block."""
        block = self.blocks.first
        scores = self._masked(self._finish_scores(self._start_scores(block), 0, block), block)
        maximum, decay = self._weigh(scores, filled_columns(LEAST), block)
        before = None if self.split is None else Merged(self._zeros(), Stats(filled_columns(LEAST), filled_columns(0)))
        return State(self._zeros(), Stats(maximum, self._no_total()), decay, before)

    def _block(self, block: Any, state: State) -> State:
        """Takes a block's scores and the values of the block before."""
        scores = self._start_scores(block)
        values, stats = self._start_values(block - 1, state)
        scores = self._masked(self._finish_scores(scores, self.tiles, block), block)
        largest_before, before = stats.maximum, state.before
        if self.split is not None:
            fresh = lax.div(block, self.split) != lax.div(block - 1, self.split)
            largest_before = lax.cond(fresh, lambda: filled_columns(LEAST), lambda: stats.maximum)
        maximum, decay = self._weigh(scores, largest_before, block)
        values, total = self._finish_values(block - 1, values), stats.total
        if before is not None:

            def end(values: tuple[jax.Array, ...], stats: Stats, before: Merged) -> tuple[Any, jax.Array, Merged]:
                return self._zeros(), self._no_total(), self._end_split(values, stats, before)

            values, total, before = lax.cond(
                fresh, end, lambda values, stats, before: (values, stats.total, before), values, stats, before
            )
        return State(values, Stats(maximum, total), decay, before)

    def _end_split(self, values: tuple[jax.Array, ...], stats: Stats, before: Merged | None) -> Merged:
        """Returns a split and those before it, merged."""
        total = add_lanes_of_columns(stats.total, self.shared.numbers.at[1], self.interpret)
        stats = stats._replace(total=total)
        if before is None:
            return Merged(values, stats)
        merged, kept, taken = merge_stats(before.stats, stats, self.math)
        products = (self.math.product(x, down(taken)) for x in values)
        sums = zip(before.values, products, strict=True)
        return Merged(tuple(self.math.fused(old, down(kept), x) for old, x in sums), merged)

    def _zeros(self) -> tuple[jax.Array, ...]:
        return tuple(filled((ROWS, COLUMNS), 0) for _ in range(self.tiles))

    def _no_total(self) -> jax.Array:
        return of_lanes(filled_columns(0), self.interpret)

    def _start_scores(self, block: Any) -> Tile:
        slot = self._slot(block)
        plgpu.barrier_wait(self.ring.keys_full.at[slot])
        low, high = (
            start(None, (self.ring.keys.at[slot, pl.ds(i * ROWS, ROWS)],), (self.queries,), interpret=self.interpret)
            for i in range(2)
        )
        return low, high

    def _finish_scores(self, scores: Tile, after: int, block: Any) -> Tile:
        low, high = finish(after, *scores, interpret=self.interpret)
        plgpu.barrier_arrive(self.ring.keys_free.at[self._slot(block)])
        pl.when(block + 1 == self.blocks.last)(self.after_scores)
        return low, high

    def _weigh(self, scores: Tile, before: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
        """Shares the weights of a block; returns the largest score so far and the decay, (8,) each."""
        found = largest(scores, self.shared.numbers.at[0], self.interpret)
        maximum = jnp.maximum(before, found * self.factor)
        low, high = (self.math.exp2(self.math.fused(x, self.factor, down(-maximum))) for x in scores)
        share_turned((low, high), self._narrow(block), self.shared.wide, self.interpret)
        return maximum, self.math.exp2(before - maximum)

    def _start_values(self, block: Any, state: State) -> tuple[tuple[jax.Array, ...], Stats]:
        """Starts the values of a block, and adds its weights; returns the values and the stats."""
        slot = self._slot(block)
        plgpu.barrier_wait(self.ring.values_full.at[slot])
        found = []
        for i, values in enumerate(state.values):
            columns = self.ring.values.at[slot, :, pl.ds(i * ROWS, ROWS)]
            values = self.math.product(values, down(state.decay))
            weights = (self._narrow(block),)
            found.append(start(values, (columns,), weights, left_along=False, interpret=self.interpret))
        decay = of_lanes(state.decay, self.interpret)
        total = add_rows_to_lanes(state.stats.total, decay, self.shared.wide, self.interpret)
        return tuple(found), Stats(state.stats.maximum, self._spoiled(total, block))

    def _finish_values(self, block: Any, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values = finish(0, *values, interpret=self.interpret)
        plgpu.barrier_arrive(self.ring.values_free.at[self._slot(block)])
        return values

    def _masked(self, scores: Tile, block: Any) -> Tile:
        """Returns scores with -inf where a key is not seen."""

        def mask(*scores: jax.Array) -> Tile:
            first, end = self.sight.range(self.positions(), self.length)
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=TILE)
            found = []
            for i, part in enumerate(scores):
                start = block * (2 * ROWS) + i * ROWS
                seen = key < down(end - start)
                if self.sight.before is not None:
                    seen = seen & (key >= down(first - start))
                found.append(jnp.where(seen, part, -math.inf))
            return found[0], found[1]

        masked: Tile = lax.cond(self.blocks.in_part(block), mask, lambda *scores: scores, *scores)
        return masked

    def _spoiled(self, total: jax.Array, block: Any) -> jax.Array:
        """Returns totals with nan for queries that see values of which the ring made zeros."""

        def spoil(total: jax.Array) -> jax.Array:
            first, end = self.sight.range(self.positions(), self.length)
            start = block * (2 * ROWS)
            found = self.ring.found.at[self._slot(block)]
            nan = spoil_rows(filled_columns(0), first - start, end - start, found, self.interpret, COLUMN)
            return total + of_lanes(nan, self.interpret)

        spoiled: jax.Array = lax.cond(self.blocks.in_part(block), spoil, lambda total: total, total)
        return spoiled

    def _slot(self, block: Any) -> Any:
        return self.ring.slot(self._place(block))

    def _place(self, block: Any) -> Any:
        return self.position + (block - self.blocks.first)

    def _narrow(self, block: Any) -> Any:
        return self.shared.narrow.at[lax.rem(self._place(block), 2)]
