"""The loop of a computing warpgroup over the key blocks of at most 8 rows: keys are wgmma's rows, rows its columns.

The sums equal those of `KeyLoop`, element by element, but a tile of scores takes 8 registers per thread, not 64. The
weights pass through shared memory, from which wgmma reads its columns. The values of a block are multiplied
concurrently with the scores of the next, and the weights are added concurrently with both.
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

from pallas_kernels.attention.hopper._mask_bounds import Blocks, MaskBounds
from pallas_kernels.attention.hopper._online import Stats
from pallas_kernels.attention.hopper.columns import (
    COLUMN,
    COLUMNS,
    Tile,
    add_lanes_of_columns,
    add_rows_to_lanes,
    down,
    filled_columns,
    largest,
    of_lanes,
    share_transposed,
)
from pallas_kernels.attention.hopper.zero_fill import poison_rows
from pallas_kernels.contract import LEAST
from pallas_kernels.parts.hopper.products import finish, start
from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, filled


class Shared(NamedTuple):
    """Shared memory of the warpgroup, as `columns.scratch` returns it.

    Attributes:
        narrow: Rounded weights of two alternating blocks, (2, 8, 128).
        wide: Weights of a block.
        numbers: For reductions over keys: of maxima, and of totals.
    """

    narrow: Any
    wide: Any
    numbers: Any


class State(NamedTuple):
    """The loop state carried from block to block.

    Attributes:
        values: Tiles (64, 8) float32 for each 64 columns of the values, excluding the last block.
        stats: (8,) maxima, and totals as `of_lanes` has them, without the last block's weights.
        decay: (8,) float32, the last block's.
    """

    values: tuple[jax.Array, ...]
    stats: Stats
    decay: jax.Array


@dataclass(frozen=True)
class SwappedKeyLoop:
    """The loop of a warpgroup over the blocks of one split, of 128 keys each.

    Attributes:
        factor: Factor of the scores.
        mask_bounds: The mask bounds.
        positions: (8,) int32, the positions of the queries.
        length: Keys of the sequence.
        blocks: The blocks.
        queries: Shared memory (8, H).
        ring: The pipeline of the blocks, a `Ring`.
        position: Pipeline position of the first block.
        shared: Additional shared memory.
        after_scores: Called after the last read of the queries.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """

    factor: float
    mask_bounds: MaskBounds
    positions: Callable[[], jax.Array]
    length: Any
    blocks: Blocks
    queries: Any
    ring: Any
    position: Any
    shared: Shared
    after_scores: Callable[[], None]
    interpret: bool

    @property
    def math(self) -> Arithmetic:
        """The instructions."""
        return Arithmetic(interpret=self.interpret, axis=0)

    @property
    def width(self) -> int:
        """Columns of the values."""
        return self.ring.values.shape[2]

    @property
    def tiles(self) -> int:
        """Tiles of the values."""
        return self.width // ROWS

    def run(self) -> tuple[tuple[jax.Array, ...], Stats]:
        """Processes all blocks, at least one.

        Returns:
            The values, a tile (64, 8) for each 64 of their columns, and the stats (8,), lanes added.
        """
        first, last = self.blocks.first, self.blocks.last
        state = lax.fori_loop(first + 1, last, self._block, self._first())
        values, stats = self._start_values(last - 1, state)
        total = add_lanes_of_columns(stats.total, self.shared.numbers.at[1], self.interpret)
        values = self._finish_values(last - 1, values)
        return values, Stats(stats.maximum, total)

    def _first(self) -> State:
        """Processes the first block."""
        block = self.blocks.first
        scores = self._masked(self._finish_scores(self._start_scores(block), 0, block), block)
        least = filled_columns(LEAST)
        maximum, decay = self._weigh(scores, least, block)
        values = tuple(filled((ROWS, COLUMNS), 0) for _ in range(self.tiles))
        return State(values, Stats(maximum, of_lanes(filled_columns(0), self.interpret)), decay)

    def _block(self, block: Any, state: State) -> State:
        """Processes a block's scores and the previous block's values."""
        scores = self._start_scores(block)
        values, stats = self._start_values(block - 1, state)
        scores = self._masked(self._finish_scores(scores, self.tiles, block), block)
        maximum, decay = self._weigh(scores, stats.maximum, block)
        return State(self._finish_values(block - 1, values), Stats(maximum, stats.total), decay)

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
        share_transposed((low, high), self._narrow(block), self.shared.wide, self.interpret)
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
        return tuple(found), Stats(state.stats.maximum, self._poisoned(total, block))

    def _finish_values(self, block: Any, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values = finish(0, *values, interpret=self.interpret)
        plgpu.barrier_arrive(self.ring.values_free.at[self._slot(block)])
        return values

    def _masked(self, scores: Tile, block: Any) -> Tile:
        """Returns scores with -inf where a key is not seen."""

        def mask(*scores: jax.Array) -> Tile:
            first, end = self.mask_bounds.range(self.positions(), self.length)
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=TILE)
            found = []
            for i, part in enumerate(scores):
                start = block * (2 * ROWS) + i * ROWS
                seen = key < down(end - start)
                if self.mask_bounds.before is not None:
                    seen = seen & (key >= down(first - start))
                found.append(jnp.where(seen, part, -math.inf))
            return found[0], found[1]

        return lax.cond(self.blocks.in_part(block), mask, lambda *scores: scores, *scores)

    def _poisoned(self, total: jax.Array, block: Any) -> jax.Array:
        """Returns totals with nan for queries that see values zero-filled by the pipeline."""

        def poison(total: jax.Array) -> jax.Array:
            first, end = self.mask_bounds.range(self.positions(), self.length)
            start = block * (2 * ROWS)
            found = self.ring.found.at[self._slot(block)]
            nan = poison_rows(filled_columns(0), first - start, end - start, found, self.interpret, COLUMN)
            return total + of_lanes(nan, self.interpret)

        return lax.cond(self.blocks.in_part(block), poison, lambda total: total, total)

    def _slot(self, block: Any) -> Any:
        return self.ring.slot(self._place(block))

    def _place(self, block: Any) -> Any:
        return self.position + (block - self.blocks.first)

    def _narrow(self, block: Any) -> Any:
        return self.shared.narrow.at[lax.rem(self._place(block), 2)]
