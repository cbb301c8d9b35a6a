"""Several warpgroups for one item over 8-bit keys, where there are fewer items than multiprocessors.

Two warpgroups make weights, of every second block each: their scores do not depend on each other, and the largest
score passes from one to the other. Each other one has 64 columns of the values. The sums equal those of `ByteKeyLoop`.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._byte_key_loop import ByteKeyLoop
from pallas_kernels.attention.hopper._decode_results import Results, store_columns
from pallas_kernels.attention.hopper._item_rows import ItemRows
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.bytes_left import scale_queries, start_widened, widen_values
from pallas_kernels.attention.hopper.columns import (
    COLUMN,
    COLUMNS,
    add_lanes_of_columns,
    add_rows_to_lanes,
    down,
    filled_columns,
    largest,
    of_lanes,
    scratch,
    share_transposed,
)
from pallas_kernels.contract import LEAST
from pallas_kernels.parts.hopper.products import finish
from pallas_kernels.parts.hopper.tile import ROWS, filled

SCORERS: Final = 2
"""Warpgroups that make weights."""


class TeamShared(NamedTuple):
    """Shared memory and barriers of the warpgroups of an item, for blocks in turn.

    Attributes:
        narrow: Rounded weights, (2, 8, 128).
        wide: Weights, (2, n) float32.
        numbers: (3, 32) float32, for reductions over keys.
        maxima: (2, 8) float32, the largest score up to a block.
        decays: (2, 8) float32.
        factors: (H,) float32, of the keys.
        factors_full: A barrier.
        turns: A barrier for each: the largest score is there.
        full: A barrier for each: weights and decays are there.
        free: A barrier for each: they are read.
        scaled: A barrier: the queries are scaled.
    """

    narrow: Any
    wide: Any
    numbers: Any
    maxima: Any
    decays: Any
    factors: Any
    factors_full: Any
    turns: Any
    full: Any
    free: Any
    scaled: Any

    @classmethod
    def types(cls, dtype: Any, size: int, tiles: int) -> "TeamShared":
        """Returns the types for keys of a width, with so many warpgroups for the values."""
        narrow, wide, _ = scratch(dtype)
        return cls(
            narrow=narrow,
            wide=plgpu.SMEM((SCORERS, *wide.shape), jnp.float32),
            numbers=plgpu.SMEM((SCORERS + 1, 4 * COLUMNS), jnp.float32),
            maxima=plgpu.SMEM((SCORERS, COLUMNS), jnp.float32),
            decays=plgpu.SMEM((SCORERS, COLUMNS), jnp.float32),
            factors=plgpu.SMEM((size,), jnp.float32),
            factors_full=plgpu.Barrier(),
            turns=plgpu.Barrier(num_barriers=SCORERS),
            full=plgpu.Barrier(num_barriers=SCORERS),
            free=plgpu.Barrier(num_arrivals=tiles, num_barriers=SCORERS),
            scaled=plgpu.Barrier(),
        )


@dataclass(frozen=True)
class TeamLoop(ByteKeyLoop):
    """A `ByteKeyLoop` of several warpgroups.

    Attributes:
        shared: A `TeamShared`.
    """

    shared: Any

    def score(self, scorer: Any) -> None:
        """Makes the weights of every second block."""
        own = lax.rem(scorer + self.position, SCORERS)  # of two: the distance from the first block to the first own one
        begin = self.blocks.first + own

        @pl.loop(0, lax.div(self.blocks.last - begin + 1, SCORERS))
        def _(i: Any) -> None:
            block = begin + i * SCORERS
            self._send(scorer, block)

    def _send(self, scorer: Any, block: Any) -> None:
        m, place = self.shared, self._place(block)
        scores = self._masked(self._finish_scores(self._start_scores(block), 0, block), block)
        found = largest(scores, m.numbers.at[scorer], self.interpret) * self.factor
        pl.when(place >= SCORERS)(lambda: plgpu.barrier_wait(m.free.at[scorer]))
        other = 1 - scorer
        pl.when(place > 0)(lambda: plgpu.barrier_wait(m.turns.at[other]))
        before = plgpu.load(m.maxima.at[other], layout=COLUMN, optimized=False)
        before = jnp.where(jnp.full((COLUMNS,), block > self.blocks.first), before, jnp.float32(LEAST))
        maximum = jnp.maximum(before, found)
        m.maxima.at[scorer][...] = maximum
        plgpu.commit_smem()
        plgpu.barrier_arrive(m.turns.at[scorer])
        low, high = (self.math.exp2(self.math.fused(x, self.factor, down(-maximum))) for x in scores)
        m.decays.at[scorer][...] = self.math.exp2(before - maximum)
        share_transposed((low, high), m.narrow.at[scorer], m.wide.at[scorer], self.interpret)
        plgpu.barrier_arrive(m.full.at[scorer])

    def _give_back(self, slot: Any) -> None:
        """Says that the values of a stage were read."""
        plgpu.commit_smem()  # by every warp
        plgpu.barrier_arrive(self.ring.values.free.at[slot])

    def multiply(self, part: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Multiplies 64 columns of the values of all blocks.

        Returns:
            The values (64, 8), and the largest scores and the sums of weights, which are part 0's.
        """
        m, stored = self.shared, self.ring.values
        zero = filled_columns(0)

        def step(block: Any, carry: Any) -> Any:
            values, total, _ = carry
            at, slot = lax.rem(self._place(block), SCORERS), self._slot(block)
            plgpu.barrier_wait(stored.full.at[slot])
            narrow = m.narrow.at[at]
            words = widen_values(stored.stored.at[slot], part, narrow.dtype, self.ring.fp8, self.interpret)
            if not self.ring.fp8:  # else `found` of the stage is read
                self._give_back(slot)
            plgpu.barrier_wait(m.full.at[at])
            decay, maximum = (plgpu.load(x.at[at], layout=COLUMN, optimized=False) for x in (m.decays, m.maxima))
            values = self.math.product(values, down(decay))
            values = start_widened(values, words, narrow, self.interpret)

            def add(total: jax.Array) -> jax.Array:
                total = add_rows_to_lanes(total, of_lanes(decay, self.interpret), m.wide.at[at], self.interpret)
                return self._poisoned(total, block) if self.ring.fp8 else total

            total = lax.cond(part == 0, add, lambda total: total, total)
            (values,) = finish(0, values, interpret=self.interpret)
            if self.ring.fp8:
                self._give_back(slot)
            plgpu.barrier_arrive(m.free.at[at])
            return values, total, maximum

        carry = filled((ROWS, COLUMNS), 0), of_lanes(zero, self.interpret), zero
        values, total, maximum = lax.fori_loop(self.blocks.first, self.blocks.last, step, carry)
        return values, (maximum, total)


def compute(body: Any, part: Any, refs: Any, results: Results, queries: tuple[Any, Any, Any], ring: Any) -> None:
    """Computes all items of a block of the grid.

    Args:
        body: The kernel's program, a `decode.Body`.
        part: The warpgroup: scorers come first.
        refs: The arrays of the call.
        results: Where results go.
        queries: Tiles of queries, and their barriers.
        ring: The stages, and the shared memory of the warpgroups.
    """
    (rows_of, full, free), (stages, shared), lengths = queries, ring, Lengths(refs.limits)
    worker = body.number(0)

    def one(index: Any, carry: Any) -> Any:
        position, done = carry
        item = body.item(lengths, worker, index)
        some = item.blocks.last > item.blocks.first

        @pl.when(some)
        def _() -> None:
            slot = lax.rem(done, 2)
            rows = ItemRows(body.setup, refs, item, slot, position)
            loop: TeamLoop = rows.column_loop(TeamLoop, rows_of.at[slot], stages, shared, lambda: None)

            @pl.when(part < SCORERS)
            def _() -> None:
                @pl.when(part == 0)
                def _() -> None:
                    # Copied while the queries are: a load after them would wait for GPU memory once more.
                    plgpu.copy_gmem_to_smem(rows.factors(refs.key_scale), shared.factors, shared.factors_full)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_wait(shared.factors_full)
                    scale_queries(rows_of.at[slot], shared.factors, body.setup.unit, rows.interpret)
                    plgpu.barrier_arrive(shared.scaled)

                pl.when(part != 0)(lambda: plgpu.barrier_wait(shared.scaled))
                loop.score(part)
                plgpu.barrier_arrive(free.at[slot])

            @pl.when(part >= SCORERS)
            def _() -> None:
                _store(loop, part - SCORERS, rows, body, results)

        return position + jnp.maximum(item.blocks.last - item.blocks.first, 0), done + jnp.where(some, 1, 0)

    position = lax.fori_loop(0, body.count(worker), one, (jnp.int32(0), jnp.int32(0)))[0]

    @pl.when(part < SCORERS)  # every signal is awaited
    def _() -> None:
        own = lax.rem(position + part, SCORERS)
        pl.when((own == 0) & (position > 0))(lambda: plgpu.barrier_wait(shared.turns.at[1 - part]))
        pl.when(position > part)(lambda: plgpu.barrier_wait(shared.free.at[part]))


def _store(loop: TeamLoop, part: Any, rows: ItemRows, body: Any, results: Results) -> None:
    """Multiplies 64 columns of the values of an item, and writes them; part 0 writes the stats too."""
    values, (maximum, total) = loop.multiply(part)
    place, item = body.place(rows.item), rows.item
    target = results.of(place, item.split, whole=False)
    columns = target.values.at[:, pl.ds(part * ROWS, ROWS)]

    @pl.when(part == 0)
    def _() -> None:
        of_rows = add_lanes_of_columns(total, loop.shared.numbers.at[SCORERS], rows.interpret)
        stats = (maximum, of_rows)
        store_columns(columns, target.numbers, place, (values,), stats, body.rows, rows.interpret, True)

    @pl.when(part != 0)
    def _() -> None:
        store_columns(columns, (), place, (values,), (), body.rows, rows.interpret, True)
