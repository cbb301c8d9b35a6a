"""The loop of a computing warpgroup over the key blocks of 64 queries.

The scores of a block and the weighted values of the previous block are started together; the tensor core computes the
values while the warpgroup turns the scores into weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.attention.hopper._mask_bounds import Blocks, MaskBounds
from pallas_kernels.attention.hopper._online import Stats, merge_stats, no_keys, weigh
from pallas_kernels.attention.hopper._ring import Ring
from pallas_kernels.attention.hopper._score_operands import ScoreOperands
from pallas_kernels.attention.hopper._scores import Scoring
from pallas_kernels.attention.hopper.band import keep_band
from pallas_kernels.attention.hopper.spilled import reload, reload_rows, spill, spill_rows
from pallas_kernels.attention.hopper.zero_fill import poison_rows
from pallas_kernels.contract import SplitAttentionContract
from pallas_kernels.parts.hopper.products import WIDEST, after_wait, await_sums, finish, start
from pallas_kernels.parts.hopper.tile import ROWS, Arithmetic, across, add_lanes, filled


class State(NamedTuple):
    """The loop state carried from block to block.

    Attributes:
        values: (64, H) float32, excluding the last block.
        stats: Of the split that the last block belongs to, lanes apart.
        weights: (64, block) of the values' dtype, of the last block.
        factor: (64,) float32, of the values: the last block's decay, or the merge factor of a split that it ends.
        kept: (64,) float32, factor of the spilled values, if the last block begins a split.
    """

    values: jax.Array
    stats: Stats
    weights: jax.Array
    factor: jax.Array
    kept: jax.Array


class Spilled(NamedTuple):
    """Spill memory of a warpgroup for the previous splits; registers hold only the state of the current split.

    Attributes:
        values: (64 * H,) float32 of shared or of GPU memory.
        rows: (2, 64) float32 of shared memory, maximum and total.
    """

    values: Any
    rows: Any


@dataclass(frozen=True)
class KeyLoop:
    """The loop of a warpgroup over the blocks of one tile.

    Attributes:
        contract: Order of the sums.
        scoring: From products to scores.
        mask_bounds: The mask bounds.
        positions: Returns the positions of the queries, (64,) int32.
        operands: The bias, slopes and mask.
        length: Keys of the sequence.
        blocks: The blocks of the tile, the same for all warpgroups that share the pipeline.
        queries: Shared memory (64, H).
        ring: The pipeline of the blocks.
        position: Pipeline position of the first block of the tile.
        spilled: Spill memory of the previous splits; None for one split.
        after_scores: Called after the last read of the queries.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        widest: Most columns of values in one instruction.
    """

    contract: SplitAttentionContract
    scoring: Scoring
    mask_bounds: MaskBounds
    positions: Callable[[], jax.Array]
    operands: ScoreOperands
    length: Any
    blocks: Blocks
    queries: Any
    ring: Ring
    position: Any
    spilled: Spilled | None
    after_scores: Callable[[], None]
    interpret: bool
    widest: int = WIDEST

    @property
    def size(self) -> int:
        """Width of a head of the values."""
        return self.ring.values.shape[2]

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.scoring.factor_left(self.operands.is_added)

    @property
    def math(self) -> Arithmetic:
        """The instructions on tiles of 64 rows."""
        return Arithmetic(interpret=self.interpret)

    def run(self) -> tuple[jax.Array, Stats]:
        """Processes all blocks, at least one.

        Returns:
            The values (64, H), and the stats, lanes added.
        """
        first, last = self.blocks.first, self.blocks.last
        state = lax.fori_loop(first + 1, last, self._block, self._first())
        values, stats = self._start_values(last - 1, state)
        stats = stats._replace(total=add_lanes(stats.total, self.interpret))
        (values,) = finish(0, values, interpret=self.interpret)
        plgpu.barrier_arrive(self.ring.values_free.at[self._slot(last - 1)])
        spilled = self.spilled
        if spilled is None:
            return values, stats

        def merged(values: jax.Array, stats: Stats) -> tuple[jax.Array, Stats]:
            merged, kept, taken = merge_stats(self._stats_before(spilled), stats, self.math)
            values = self.math.product(values, across(taken, self.size))
            old = reload(spilled.values, self.size, self.interpret)
            return self.math.fused(old, across(kept, self.size), values), merged

        return lax.cond(self._in_first_split(last - 1), lambda values, stats: (values, stats), merged, values, stats)

    def _first(self) -> State:
        """Processes the first block."""
        block = self.blocks.first
        plgpu.barrier_wait(self.ring.keys_full.at[self._slot(block)])
        scores = start(None, (self.queries,), (self._keys(block),), interpret=self.interpret)
        scores = self._masked(self._finish_scores(scores, 0, block, self._biases(block)), block)
        stats, decay, weights = weigh(scores, no_keys(), self.factor, self.contract, self.math)
        weights = weights.astype(self.ring.values.dtype)
        return State(filled((ROWS, self.size), 0), stats, weights, decay, decay)

    def _block(self, block: Any, state: State) -> State:
        """Processes a block's scores and the previous block's values."""
        plgpu.barrier_wait(self.ring.keys_full.at[self._slot(block)])
        scores = start(None, (self.queries,), (self._keys(block),), interpret=self.interpret)
        bias = self._biases(block)
        values, stats = self._start_values(block - 1, state)
        scores = self._masked(self._finish_scores(scores, 1, block, bias), block)
        begin, taken, kept = stats, None, state.kept
        spilled = self.spilled
        if spilled is not None:
            fresh = self._begins_split(block)

            def end_split(stats: Stats) -> tuple[Stats, jax.Array, jax.Array]:
                stats = stats._replace(total=add_lanes(stats.total, self.interpret))
                before = lax.cond(self._in_first_split(block - 1), no_keys, partial(self._stats_before, spilled))
                merged, kept, taken = merge_stats(before, stats, self.math)
                spill_rows(merged, spilled.rows, self.interpret)
                return no_keys(), taken, kept

            begin, taken, kept = lax.cond(fresh, end_split, lambda stats: (stats, state.kept, state.kept), stats)
        new, factor, weights = weigh(scores, begin, self.factor, self.contract, self.math)
        if taken is not None:
            factor = lax.cond(fresh, lambda: taken, lambda: factor)
        new, factor, weights = lax.optimization_barrier((new, factor, weights))
        await_sums(new.total, self.interpret)
        values, weights = finish(0, values, weights, interpret=self.interpret)
        plgpu.barrier_arrive(self.ring.values_free.at[self._slot(block - 1)])
        return State(values, new, weights.astype(self.ring.values.dtype), factor, kept)

    def _start_values(self, block: Any, state: State) -> tuple[jax.Array, Stats]:
        """Starts the values of a block, and returns them and its stats."""
        stats = self._wait_for_values(block, state.stats)
        factor = after_wait(state.factor, self.interpret)  # or these products would delay the scores
        values = self.math.product(state.values, across(factor, self.size))
        spilled = self.spilled
        if spilled is not None:

            def put_aside(values: jax.Array) -> jax.Array:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                kept = across(state.kept, self.size)
                spill(values, kept, spilled.values, self._in_first_split(block - 1), self.interpret)
                return filled((ROWS, self.size), 0)

            begins = (block != self.blocks.first) & self._begins_split(block)
            values = lax.cond(begins, put_aside, lambda values: values, values)
        pieces = (self._values(block),)
        values = start(values, state.weights, pieces, right_along=False, widest=self.widest, interpret=self.interpret)
        return values, stats

    def _stats_before(self, spilled: Spilled) -> Stats:
        return Stats(*reload_rows(spilled.rows, self.interpret))

    def _in_first_split(self, block: Any) -> Any:
        """Returns whether a block belongs to the tile's first split, before which nothing is spilled."""
        return self._split(block) == self._split(self.blocks.first)

    def _begins_split(self, block: Any) -> Any:
        return self._split(block) != self._split(block - 1)

    def _split(self, block: Any) -> Any:
        return lax.div(block, self.contract.split // self.contract.key_block)

    def _slot(self, block: Any) -> Any:
        return self.ring.slot(self.position + (block - self.blocks.first))

    def _keys(self, block: Any) -> Any:
        return self.ring.keys.at[self._slot(block)]

    def _values(self, block: Any) -> Any:
        return self.ring.values.at[self._slot(block)]

    def _biases(self, block: Any) -> jax.Array | None:
        keys = self.contract.key_block
        return self.operands.biases(block * keys, keys)

    def _finish_scores(self, scores: jax.Array, after: int, block: Any, bias: jax.Array | None) -> jax.Array:
        (scores,) = finish(after, scores, interpret=self.interpret)
        plgpu.barrier_arrive(self.ring.keys_free.at[self._slot(block)])
        pl.when(block + 1 == self.blocks.last)(self.after_scores)
        start = lambda: block * self.contract.key_block - self.positions()  # noqa: E731
        scores = self.scoring.tangents(scores, self.math)
        if bias is not None:
            scores = self.scoring.biased(scores, bias, self.math)
        return self.scoring.sloped(
            scores, self.operands.slope, start, self.math, self.scoring.factor_left(bias is not None)
        )

    def _masked(self, scores: jax.Array, block: Any) -> jax.Array:
        """Returns scores with -inf where a key is not seen."""

        def mask(scores: jax.Array) -> jax.Array:
            first, end = self.mask_bounds.range(self.positions(), self.length)
            start = block * self.contract.key_block
            limit = None if self.mask_bounds.before is None else first - start
            return keep_band(scores, limit, end - start - 1, -math.inf, self.interpret, self._words(block))

        if self.mask_bounds.masked:
            return mask(scores)
        return lax.cond(self.blocks.in_part(block), mask, lambda scores: scores, scores)

    def _words(self, block: Any) -> tuple[jax.Array, ...]:
        keys = self.contract.key_block
        return self.operands.words(block * keys, keys)

    def _wait_for_values(self, block: Any, stats: Stats) -> Stats:
        """Returns the stats with nan for queries that see values zero-filled by the pipeline."""
        plgpu.barrier_wait(self.ring.values_full.at[self._slot(block)])

        def poisoned(total: jax.Array) -> jax.Array:
            first, end = self.mask_bounds.range(self.positions(), self.length)
            start = block * self.contract.key_block
            found = self.ring.found.at[self._slot(block)]
            return poison_rows(total, first - start, end - start, found, self.interpret, bits=self._words(block))

        return stats._replace(total=lax.cond(self.blocks.in_part(block), poisoned, lambda total: total, stats.total))
