"""The gradients of attention in one kernel: a block of 128 keys at a time, over the tiles of queries that see it.

Two warpgroups have 64 keys each, with the gradients of keys and values in registers; a third one fetches tiles of
queries. The gradient of a query tile is a sum over key blocks, which belong to different blocks of the grid. The warps
of a fourth one accumulate it in global memory once the next key block has been accumulated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._gradient_scratch import Scratch
from pallas_kernels.attention.hopper._gradient_steps import (
    NEVER,
    PARTS,
    STATS,
    TURNS,
    GradientCall,
    Operands,
    Results,
    Step,
)
from pallas_kernels.attention.hopper._gradient_tiles import Item, Tiles
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.band import keep_band
from pallas_kernels.attention.schedule.hopper import GradientSchedule
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.stages import await_free, drain
from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, filled


class Ahead(NamedTuple):
    """A step that may come.

    Attributes:
        exists: Whether it comes.
        step: Makes it, without the slope of its head.
    """

    exists: Any
    step: Callable[[], Step]


@dataclass(frozen=True)
class Body:
    """The kernel's program."""

    call: GradientCall
    schedule: GradientSchedule

    @property
    def rounds(self) -> int:
        """Pieces of the gradient of a tile's queries that a warpgroup passes on per step."""
        return 1

    @property
    def tiles(self) -> Tiles:
        """The tiles of the call."""
        return self.call.tiles

    @property
    def math(self) -> Arithmetic:
        """The instructions on tiles of 64 rows."""
        return Arithmetic(interpret=bool(self.call.interpret))

    def over_items(self, lengths: Lengths, start: Any, one: Any, order: Any = None) -> Any:
        """Calls `one(item, carry)` for all items of this block of the grid, and returns the last carry.

        With the table of a `GradientOrder`, for its parts.
        """
        place = lax.axis_index("block")
        if order is not None:
            return lax.fori_loop(
                0,
                order[0, place],
                lambda index, carry: one(self.tiles.part(lengths, order[index + 1, place]), carry),
                start,
            )
        return lax.fori_loop(
            self.tiles.first_round(place),
            self.tiles.rounds,
            lambda index, carry: one(self.tiles.item(lengths, place, index), carry),
            start,
        )

    def each_tile(self, item: Item, one: Any) -> None:
        """Calls `one(query head, tile, step)` for all steps of an item: its query heads, and their tiles of queries."""

        @pl.loop(item.start, item.end)
        def _(index: Any) -> None:
            @pl.loop(item.first, item.first + item.count)
            def _(tile: Any) -> None:
                one(item.head * self.tiles.group + index, tile, (index - item.start) * item.count + (tile - item.first))

    def produce(self, given: Operands, lengths: Lengths, scratch: Any) -> None:
        """Fetches keys and values of all items, and the tiles of queries that see them."""

        def one(item: Item, carry: Any) -> Any:
            done, position = carry
            pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch.cache_free))
            self.fetch_keys(given, item, scratch)

            def fetch(head: Any, index: Any, step: Any) -> None:
                self.fetch_queries(given, item, head, index, position + step, scratch)

            self.each_tile(item, fetch)
            return done + 1, position + item.steps

        position = self.over_items(lengths, (jnp.int32(0), jnp.int32(0)), one, given.order)[1]
        plgpu.barrier_wait(scratch.cache_free)
        for free, stages in self.rings(scratch):
            drain((free,), stages, position)

    def rings(self, scratch: Any) -> tuple[tuple[Any, int], ...]:
        """Returns the barriers of free stages of what is fetched for each tile of queries, and how many there are."""
        return ((scratch.stage_free, self.schedule.stages),)

    def fetch_keys(self, given: Operands, item: Item, scratch: Any) -> None:
        """Starts the copies of the keys, values and marks of an item."""
        start = item.block * self.tiles.block
        for part in range(PARTS):
            rows = pl.ds(start + part * ROWS, ROWS)
            for column in range(self.call.columns):
                source = given.key.at[item.sequence, rows, item.head, pl.ds(column * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(source, scratch.keys.at[column, part], scratch.cache_full)
            source = given.value.at[item.sequence, rows, item.head]
            plgpu.copy_gmem_to_smem(source, scratch.values.at[part], scratch.cache_full)
            marks = given.marks.at[item.sequence, item.head, rows]
            plgpu.copy_gmem_to_smem(marks, self.marks(part, scratch), scratch.cache_full)

    def fetch_queries(self, given: Operands, item: Item, head: Any, index: Any, at: Any, scratch: Any) -> None:
        """Starts the copies of a tile of queries, with its cotangents and numbers, into the stages of a position."""
        stages = self.schedule.stages
        slot, first = lax.rem(at, stages), index * self.tiles.rows
        await_free(at, stages, scratch.stage_free.at[slot])
        rows, queries_full = pl.ds(first, self.tiles.rows), scratch.queries_full.at[slot]
        numbers = scratch.numbers.at[pl.ds(slot * STATS, STATS)]
        plgpu.copy_gmem_to_smem(given.stats.at[item.sequence, head, :, rows], numbers, queries_full)
        plgpu.copy_gmem_to_smem(given.query.at[item.sequence, rows, head], scratch.queries.at[slot], queries_full)
        source, full = given.cotangent.at[item.sequence, rows, head], scratch.cotangents_full.at[slot]
        plgpu.copy_gmem_to_smem(source, scratch.cotangents.at[slot], full)

    def marks(self, part: Any, scratch: Any) -> Any:
        """Returns where the numbers of 64 keys of a block are."""
        at, width = part * ROWS, self.tiles.rows
        return scratch.numbers.at[self.schedule.stages * STATS + at // width, pl.ds(at % width, ROWS)]

    def add(self, lengths: Lengths, turns: Any, target: Any, scratch: Scratch, order: Any = None) -> None:
        """Accumulates the query gradients of the steps, in descending order of key blocks.

        For each warpgroup that computes, two warps take the steps in turns: while the additions of one are under way,
        the other one waits for sums and for their turn. `turns` counts, for each tile of queries of each head and each
        of these warpgroups, the blocks of keys that have been added.
        """
        tiles = self.tiles

        @plgpu.warp_map
        def _(warp: Any) -> None:
            part, own_turn = lax.rem(warp, PARTS), lax.div(warp, PARTS)

            def one(item: Item, position: Any) -> Any:
                offset, keys = lengths.offsets[item.sequence], lengths.keys[item.sequence]

                def add(head: Any, tile: Any, step: Any) -> None:
                    before = tiles.last_block(offset, keys, tile) - item.block
                    of_tile = (item.sequence * tiles.heads * tiles.group + head) * tiles.across + tile
                    turn, sums = turns.at[of_tile * PARTS + part], target.at[:, :, head]
                    for index in range(self.rounds):
                        at = (position + step) * self.rounds + index
                        piece = scratch.sums.at[lax.rem(at, self.schedule.buffers) * PARTS + part]
                        place = self.place_of_sums(item, tile, sums, part, index)
                        # Additions need the lines in the L2 cache: they come while the sums are computed.
                        pl.when(before > 0)(partial(plgpu.async_prefetch, place))
                        plgpu.barrier_wait(scratch.sums_full.at[warp])

                        @pl.when(before == 0)
                        def _(piece: Any = piece, place: Any = place) -> None:
                            plgpu.copy_smem_to_gmem(piece, place)

                        @pl.when(before > 0)
                        def _(piece: Any = piece, place: Any = place, index: int = index) -> None:
                            if index == 0:
                                plgpu.semaphore_wait(turn, before, decrement=False, memory_scope="gpu")
                            plgpu.copy_smem_to_gmem(piece, place, reduction_op="add")

                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.barrier_arrive(scratch.sums_free.at[warp])
                    plgpu.wait_smem_to_gmem(0)
                    plgpu.semaphore_signal(turn, 1, memory_scope="gpu")

                def in_turn(head: Any, tile: Any, step: Any) -> None:
                    pl.when(lax.rem(position + step, TURNS) == own_turn)(partial(add, head, tile, step))

                self.each_tile(item, in_turn)
                return position + item.steps

            self.over_items(lengths, jnp.int32(0), one, order)

    def place_of_sums(self, item: Item, tile: Any, target: Any, part: Any, index: int) -> Any:
        """Returns where a warpgroup's piece of a round of a tile's gradient lies in GPU memory (B, T, H)."""
        row, columns = self.place(part, index)
        return target.at[item.sequence, pl.ds(tile * self.tiles.rows + row, ROWS), columns]

    def place(self, part: Any, index: int) -> tuple[Any, Any]:
        """Returns the first query and the columns that a warpgroup passes on in a round."""
        row, column = self.piece(part)
        return row * ROWS, pl.ds(column * ROWS, ROWS)

    def piece(self, part: Any) -> tuple[Any, Any]:
        """Returns which piece of 64 queries and 64 columns of a tile's gradient a warpgroup computes."""
        return (0, part) if self.call.columns > 1 else (part, 0)

    def compute(self, slopes: Any, lengths: Lengths, results: Results, scratch: Scratch, order: Any = None) -> None:
        """Computes the gradients of this warpgroup's keys of all items, and of all queries that see them."""
        part, interpret = lax.axis_index("warpgroup"), bool(self.call.interpret)

        def one(item: Item, position: Any) -> Any:
            plgpu.barrier_wait(scratch.cache_full)
            not_zero_filled = scratch.numbers[self.schedule.stages * STATS, 0] != 0
            pl.when(not_zero_filled)(partial(self.zero_fill_keys, part, scratch))
            steps = item.steps

            end = item.first + item.count
            # Blocks with non-finite keys always need the mask.
            whole_first, whole_end = (jnp.where(not_zero_filled, end, x) for x in (item.whole_first, item.whole_end))

            def step_at(index: Any, tile: Any, slopes: Any = slopes) -> Step:
                at = position + index
                head = slope = None
                if interpret or slopes is not None:
                    head = item.head * self.tiles.group + item.start + lax.div(index, jnp.maximum(item.count, 1))
                if slopes is not None:
                    number = slopes[item.sequence if slopes.shape[0] > 1 else 0, head]
                    slope = plgpu.layout_cast(jnp.full((ROWS,), -number, jnp.float32), TILE.reduce(1))
                return Step(
                    item=item,
                    head=head,
                    slope=slope,
                    tile=tile,
                    slot=lax.rem(at, self.schedule.stages),
                    index=index,
                    position=at,
                    part=part,
                    keys=self.keys_of(part),
                    masked=(tile < whole_first) | (tile >= whole_end),
                )

            def step(index: Any, carry: Any) -> Any:
                tile, *found = carry
                next_tile = jnp.where(tile + 1 == end, item.first, tile + 1)
                ahead = Ahead(index + 1 < steps, partial(step_at, index + 1, next_tile, None))
                found = self.one_step(step_at(index, tile), ahead, lengths, results, scratch, *found)
                return next_tile, *found

            first = Ahead(steps > 0, partial(step_at, jnp.int32(0), item.first, None))
            before = self.start(first, scratch)
            if self.call.carried:
                before = (*self.carried(item, part, before[:2], results), *before[2:])
            _, dk, dv, *_ = lax.fori_loop(0, steps, step, (item.first, *before))
            pl.when(steps > 0)(lambda: self.end(step_at(steps - 1, end - 1, None), results, scratch))
            if self.call.carried:
                last = item.end == self.tiles.group
                pl.when(last)(partial(self.store, item, part, dk, dv, results, scratch))
                pl.when(jnp.logical_not(last))(partial(self.carry, item, part, dk, dv, results, scratch))
            else:
                self.store(item, part, dk, dv, results, scratch)
            return position + steps

        steps = self.over_items(lengths, jnp.int32(0), one, order)
        if not self.call.interpret:
            self.drain_sums(part, steps, scratch)

    def carried(self, item: Item, part: Any, none: tuple[Any, ...], results: Results) -> tuple[jax.Array, ...]:
        """Returns the gradients of keys and values over the query heads before a part's, computed by another block."""
        slot, turn = self._carried(item, part, results)

        def load() -> tuple[jax.Array, ...]:
            if turn is not None:
                plgpu.semaphore_wait(turn, item.start, decrement=False, memory_scope="gpu")
            return tuple(plgpu.load(slot.at[i], layout=TILE, optimized=False) for i in range(2))

        return lax.cond(item.start > 0, load, lambda: none)

    def carry(self, item: Item, part: Any, dk: Any, dv: Any, results: Results, scratch: Scratch) -> None:
        """Writes the gradients of keys and values for the block that takes the next query heads."""
        slot, turn = self._carried(item, part, results)
        slot.at[0][...] = dk
        slot.at[1][...] = dv
        if turn is not None:

            @pl.loop(item.start, item.end)  # a signal's number must be a constant
            def _(_: Any) -> None:
                plgpu.semaphore_signal(turn, 1, memory_scope="gpu")

        plgpu.barrier_arrive(scratch.cache_free)

    def _carried(self, item: Item, part: Any, results: Results) -> tuple[Any, Any]:
        """Returns where a warpgroup's gradients of an item are kept, and the count of query heads that they have."""
        tiles = self.tiles
        slots = self.call.carried
        slot = jnp.maximum(tiles.number(item) - (tiles.items - slots), 0) * PARTS + part
        turn = None if self.call.interpret else results.turns.at[tiles.turns * PARTS + slot]
        return results.carried.at[slot], turn

    def drain_sums(self, part: Any, steps: Any, scratch: Scratch) -> None:
        """Waits until everything that was passed on has been read."""
        for left in range(self.schedule.buffers, 0, -1):
            at = steps * self.rounds - left
            warp = lax.rem(lax.div(at, self.rounds), TURNS) * PARTS + part
            pl.when(at >= 0)(partial(plgpu.barrier_wait, scratch.sums_free.at[warp]))

    def start(self, first: Ahead, scratch: Scratch) -> tuple[jax.Array, ...]:
        """Returns the initial state of an item's steps: gradients of keys and values, the scores of the first tile."""
        keys = (ROWS, self.call.size)
        scores = finish(0, self.scores(first, jnp.int32(0), scratch), interpret=bool(self.call.interpret))
        return filled(keys, 0), filled(keys, 0), *scores

    def end(self, last: Step, results: Results, scratch: Scratch) -> None:
        """Passes on what is left after the last step of an item."""
        if not self.schedule.lagging:
            return
        self.await_slopes(scratch)
        sums = self.query_sums(last, lax.rem(last.position, 2), scratch)
        (sums,) = finish(0, sums, interpret=bool(self.call.interpret))
        self.pass_on(last, sums, results, scratch)

    def keys_of(self, part: Any) -> Any:
        """Returns which 64 keys of a block a warpgroup has."""
        return part

    def meet(self, scratch: Scratch) -> None:
        """Waits for the other warpgroup that computes."""
        plgpu.barrier_arrive(scratch.together)
        plgpu.barrier_wait(scratch.together)

    def zero_fill_keys(self, part: Any, scratch: Scratch) -> None:
        """Zero-fills keys that are not finite, since zero slopes would not mask them."""
        marks = plgpu.load(self.marks(part, scratch), layout=TILE.reduce(1), optimized=False)
        bad = jnp.where(marks == 1, 1.0, 0.0)
        for column in range(self.call.columns):
            zero_rows(scratch.keys.at[column, part], bad)
        plgpu.commit_smem()
        self.meet(scratch)

    def zero_fill_queries(self, step: Step, scratch: Scratch) -> None:
        """Zero-fills queries and cotangents of rows with non-finite numbers: one array per warpgroup."""
        for row in range(self.call.rows):
            rows = pl.ds(row * ROWS, ROWS)
            own = (scratch.numbers.at[step.slot * STATS + number, rows] for number in range(STATS - 1))
            numbers = (plgpu.load(x, layout=TILE.reduce(1), optimized=False) for x in own)
            bad = sum(jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0) for x in numbers)
            for part, x in enumerate((scratch.queries, scratch.cotangents)):

                @pl.when(step.part == part)
                def _(x: Any = x, rows: Any = rows, bad: Any = bad) -> None:
                    for column in range(self.call.columns):
                        zero_rows(x.at[step.slot, rows, pl.ds(column * ROWS, ROWS)], bad)

        plgpu.commit_smem()
        self.meet(scratch)

    def prepare(self, step: Step, scratch: Scratch) -> None:
        """Waits for a tile of queries and its cotangents."""
        plgpu.barrier_wait(scratch.queries_full.at[step.slot])
        plgpu.barrier_wait(scratch.cotangents_full.at[step.slot])
        not_zero_filled = step.masked & (scratch.numbers[step.slot * STATS + 2, 0] != 0)
        pl.when(not_zero_filled)(partial(self.zero_fill_queries, step, scratch))

    def scores(self, ahead: Ahead, otherwise: Any, scratch: Scratch) -> jax.Array:
        """Starts the products of keys and queries of a step.

        If there is no such step, the queries of another stage are multiplied, since ptxas would serialise products
        that are started in a branch.
        """
        interpret, step = bool(self.call.interpret), ahead.step()
        pl.when(ahead.exists)(partial(self.prepare, step, scratch))
        slot = jnp.where(ahead.exists, step.slot, otherwise)
        keys = tuple(scratch.keys.at[column, _opaque(step)] for column in range(self.call.columns))

        def product() -> jax.Array:
            return start(None, keys, (scratch.queries.at[slot],), interpret=interpret)

        if interpret:  # the stage may be written to
            return lax.cond(ahead.exists, product, lambda: filled((ROWS, self.tiles.rows), 0))
        return product()

    def one_step(
        self,
        step: Step,
        ahead: Ahead,
        lengths: Lengths,
        results: Results,
        scratch: Scratch,
        dk: Any,
        dv: Any,
        scores: Any = None,
    ) -> tuple[jax.Array, ...]:
        """Processes a tile of queries.

        The tensor core always has a product queued: the keys' gradient while waiting for the other warpgroup's slopes,
        the next scores while the query gradients are passed on. No product is in flight where the loop begins again:
        ptxas would serialise all of them.

        Returns:
            `dk` and `dv` with what the tile adds, and the products of keys and queries of the next step.
        """
        interpret, dtype, lagging = bool(self.call.interpret), scratch.queries.dtype, self.schedule.lagging
        part, half = _opaque(step), lax.rem(step.position, 2)
        queries, cotangents = scratch.queries.at[step.slot], scratch.cotangents.at[step.slot]
        raised = start(None, (scratch.values.at[part],), (cotangents,), interpret=interpret)
        for row in range(self.call.rows):
            piece = slice(row * ROWS, (row + 1) * ROWS)
            rows = pl.ds(row * ROWS, ROWS)
            weights, bent = self.weights(step, row, lengths, scores[:, piece], scratch)
            rounded = self.math.rounded_not_negative(weights, dtype)
            if row == 0:
                (raised,) = finish(0, raised, interpret=interpret)
            dv = start(dv, rounded, (cotangents.at[rows],), right_along=False, interpret=interpret)
            found = raised[:, piece] - self.numbers(step, row, 1, scratch)
            found = lax.cond(step.masked, lambda x, w=bent: jnp.where(w < 0, 0.0, x), lambda x: x, found)
            slopes = self.math.product(bent, found).astype(dtype)
            if row == 0 and lagging:
                pl.when(step.index > 0)(partial(self.await_slopes, scratch))
            share(slopes, scratch.slopes.at[half, part, row], interpret)
            dk = start(dk, slopes, (queries.at[rows],), right_along=False, interpret=interpret)
        if lagging:
            plgpu.barrier_arrive(scratch.slopes_full)
        else:
            self.meet(scratch)
        sums = self.query_sums(step, 1 - half if lagging else half, scratch, lagging)
        # Operands in registers are free before the next accumulators are needed.
        dk, dv = finish(1, dk, dv, interpret=interpret)
        scores = self.scores(ahead, step.slot, scratch)
        (sums,) = finish(1, sums, interpret=interpret)
        plgpu.barrier_arrive(scratch.stage_free.at[step.slot])
        if lagging:
            plgpu.barrier_arrive(scratch.slopes_free)
            pl.when(step.index > 0)(lambda: self.pass_on(_previous(step), sums, results, scratch))
        else:
            self.pass_on(step, sums, results, scratch)
        return dk, dv, *finish(0, scores, interpret=interpret)

    def await_slopes(self, scratch: Scratch) -> None:
        """Waits for the other warpgroup's slopes of the previous step, and until it has read those before."""
        plgpu.barrier_wait(scratch.slopes_full)
        plgpu.barrier_wait(scratch.slopes_free)

    def query_sums(self, step: Step, half: Any, scratch: Scratch, lagging: bool = False) -> jax.Array:
        """Starts the products of slopes and keys: this warpgroup's piece of the gradient of a tile's queries.

        A lagging step has none of the first tile: it multiplies slopes of another item, and passes nothing on.
        """
        interpret, (row, column) = bool(self.call.interpret), self.piece(_opaque(step))

        def product() -> jax.Array:
            return start(
                None,
                tuple(scratch.slopes.at[half, other, row] for other in range(PARTS)),
                tuple(scratch.keys.at[column, other] for other in range(PARTS)),
                left_along=False,
                right_along=False,
                interpret=interpret,
            )

        if interpret and lagging:  # the other warpgroup may be writing them
            return lax.cond(step.index > 0, product, lambda: filled((ROWS, ROWS), 0))
        return product()

    def pass_on(self, step: Step, sums: jax.Array, results: Results, scratch: Scratch) -> None:
        """Passes on this warpgroup's piece of the gradient of a step's queries.

        Sums that are read while the next scores run go through a product, or ptxas waits for the scores.
        """
        sums = self.math.scaled(sums, 1.0)
        if self.call.interpret:  # which has neither memory reductions nor semaphores
            self.store_sums(step, 0, sums, results, scratch)
        else:
            self.hand_on(step.position, 0, _opaque(step), sums, scratch)

    def store_sums(self, step: Step, index: int, sums: jax.Array, results: Results, scratch: Scratch) -> None:
        """Writes the sums that a warpgroup would pass on in a round to the key block's own slice."""
        scratch.sums.at[step.part][...] = sums
        plgpu.commit_smem()
        target = results.query.at[step.item.block, :, :, step.head]
        place = self.place_of_sums(step.item, step.tile, target, step.part, index)
        plgpu.copy_smem_to_gmem(scratch.sums.at[step.part], place)
        plgpu.wait_smem_to_gmem(0)

    def numbers(self, step: Step, row: int, which: int, scratch: Scratch) -> jax.Array:
        """Returns a number of each of 64 queries of a tile, broadcast over the keys (64, 64)."""
        own = scratch.numbers.at[step.slot * STATS + which, pl.ds(row * ROWS, ROWS)]
        x = plgpu.load(own, layout=TILE.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x, (ROWS, ROWS), [1])

    def weights(
        self, step: Step, row: int, lengths: Lengths, products: jax.Array, scratch: Scratch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of 64 keys (rows) for 64 queries of a tile, -1 where a key is not seen.

        A separate mask would take registers. Also returns the weights times the derivative of the soft cap.
        """

        def where_seen(*given: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(seen(weights) for weights in given)

        def seen(weights: jax.Array) -> jax.Array:
            marks = plgpu.load(self.marks(step.keys, scratch), layout=TILE.reduce(1), optimized=False)
            weights = jnp.where(lax.broadcast_in_dim(marks, weights.shape, [0]) == 1, jnp.nan, weights)
            first, last = self.tiles.seen(lengths, step.item, step.tile, step.keys)
            return keep_band(weights, first - row * ROWS, last - row * ROWS, -1.0, bool(self.call.interpret))

        def start() -> jax.Array:
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=TILE.reduce(1))
            query = lengths.offsets[step.item.sequence] + step.tile * self.tiles.rows + row * ROWS
            return query - step.item.block * self.tiles.block - step.keys * ROWS - key

        scoring, math = self.call.scoring, self.math
        tangents = scoring.tangents(products, math)
        scores = scoring.sloped(tangents, step.slope, start, math)
        factor = scoring.factor_left(step.slope is not None)
        weights = math.exp2(math.fused(scores, factor, self.numbers(step, row, 0, scratch)))
        if scoring.bend is None:
            (weights,) = lax.cond(step.masked, where_seen, lambda x: (x,), weights)
            return weights, weights
        bent = math.product(weights, math.fused(tangents, -tangents, 1.0))
        weights, bent = lax.cond(step.masked, where_seen, lambda *x: x, weights, bent)
        return weights, bent

    def hand_on(self, position: Any, index: int, part: Any, sums: jax.Array, scratch: Scratch) -> None:
        """Passes this warpgroup's piece of a round of a step to the warp whose turn it is."""
        buffers, at = self.schedule.buffers, position * self.rounds + index
        before = lax.div(at - buffers, self.rounds)  # the step that used the buffer
        pl.when(at >= buffers)(lambda: plgpu.barrier_wait(scratch.sums_free.at[lax.rem(before, TURNS) * PARTS + part]))
        share(sums, scratch.sums.at[lax.rem(at, buffers) * PARTS + part], bool(self.call.interpret))
        plgpu.barrier_arrive(scratch.sums_full.at[lax.rem(position, TURNS) * PARTS + part])

    def store(self, item: Item, part: Any, dk: jax.Array, dv: jax.Array, results: Results, scratch: Scratch) -> None:
        """Writes the gradients of this warpgroup's keys and values, overwriting both in shared memory."""
        math, dtype = self.math, scratch.queries.dtype
        dk, dv = math.fused(dk, self.call.scale, 0.0), math.fused(dv, 1.0, 0.0)  # -0 becomes +0
        scratch.values.at[part][...] = dv.astype(dtype)
        self.meet(scratch)  # the other warpgroup has read these keys
        for column in range(self.call.columns):
            columns = slice(column * ROWS, (column + 1) * ROWS)
            scratch.keys.at[column, part][...] = dk[:, columns].astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(item.block * self.tiles.block + part * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(scratch.values.at[part], results.value.at[item.sequence, rows, item.head])
        for column in range(self.call.columns):
            place = results.key.at[item.sequence, rows, item.head, pl.ds(column * ROWS, ROWS)]
            plgpu.copy_smem_to_gmem(scratch.keys.at[column, part], place)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(scratch.cache_free)


def _opaque(step: Step) -> Any:
    """Returns the warpgroup, plus a zero opaque to ptxas: constant addresses would be spilled to local memory."""
    return step.part + (step.position >> NEVER)


def _previous(step: Step) -> Step:
    """Returns the step before one that is not the first of its item."""
    first, item = step.tile == step.item.first, step.item
    tile = jnp.where(first, item.first + item.count - 1, step.tile - 1)
    head = None if step.head is None else jnp.where(first, step.head - 1, step.head)
    return step._replace(tile=tile, head=head, index=step.index - 1, position=step.position - 1)


def zero_rows(ref: Any, bad: jax.Array) -> None:
    """Zero-fills the rows of a tile (64, n) in shared memory where `bad` (64,) is not 0."""
    found = plgpu.load(ref, layout=TILE)
    ref[...] = jnp.where(lax.broadcast_in_dim(bad, found.shape, [0]) != 0, jnp.zeros((), found.dtype), found)
