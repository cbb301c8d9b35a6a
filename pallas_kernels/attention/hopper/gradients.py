"""The gradients of attention in one kernel: a block of 128 keys at a time, over the tiles of queries that see it.

Two warpgroups have 64 keys each, with the gradients of keys and values in registers; a third one fetches tiles of
queries. The gradient of a query tile is a sum over key blocks, which belong to different blocks of the grid. A fourth
warpgroup accumulates it in global memory once the next key block has been accumulated.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._gradient_scratch import Scratch
from pallas_kernels.attention.hopper._gradient_steps import NEVER, PARTS, STATS, GradientCall, Operands, Results, Step
from pallas_kernels.attention.hopper._gradient_tiles import Item, Tiles
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.band import keep_band
from pallas_kernels.attention.schedule.hopper import GradientSchedule
from pallas_kernels.parts.hopper.products import finish, share, share_in_order, start
from pallas_kernels.parts.hopper.stages import await_free, drain
from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, filled


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

    def over_items(self, lengths: Lengths, start: Any, one: Any) -> Any:
        """Calls `one(item, carry)` for all items of this block of the grid, and returns the last carry."""
        place = lax.axis_index("block")
        return lax.fori_loop(
            self.tiles.first_round(place),
            self.tiles.rounds,
            lambda index, carry: one(self.tiles.item(lengths, place, index), carry),
            start,
        )

    def each_tile(self, item: Item, one: Any) -> None:
        """Calls `one(query head, tile, step)` for all steps of an item: its query heads, and their tiles of queries."""

        @pl.loop(0, self.tiles.group)
        def _(index: Any) -> None:
            @pl.loop(item.first, item.first + item.count)
            def _(tile: Any) -> None:
                one(item.head * self.tiles.group + index, tile, index * item.count + (tile - item.first))

    def produce(self, given: Operands, lengths: Lengths, scratch: Any) -> None:
        """Fetches keys and values of all items, and the tiles of queries that see them."""

        def one(item: Item, carry: Any) -> Any:
            done, position = carry
            pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch.cache_free))
            self.fetch_keys(given, item, scratch)

            def fetch(head: Any, index: Any, step: Any) -> None:
                self.fetch_queries(given, item, head, index, position + step, scratch)

            self.each_tile(item, fetch)
            return done + 1, position + item.count * self.tiles.group

        position = self.over_items(lengths, (jnp.int32(0), jnp.int32(0)), one)[1]
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
        marks = given.marks.at[item.sequence, item.head, :, pl.ds(start, self.tiles.block)]
        plgpu.copy_gmem_to_smem(marks, scratch.marks, scratch.cache_full)

    def fetch_queries(self, given: Operands, item: Item, head: Any, index: Any, at: Any, scratch: Any) -> None:
        """Starts the copies of a tile of queries, with its cotangents and numbers, into the stages of a position."""
        stages = self.schedule.stages
        slot, first = lax.rem(at, stages), index * self.tiles.rows
        await_free(at, stages, scratch.stage_free.at[slot])
        rows, queries_full = pl.ds(first, self.tiles.rows), scratch.queries_full.at[slot]
        plgpu.copy_gmem_to_smem(given.stats.at[item.sequence, head, :, rows], scratch.stats.at[slot], queries_full)
        plgpu.copy_gmem_to_smem(given.query.at[item.sequence, rows, head], scratch.queries.at[slot], queries_full)
        source, full = given.cotangent.at[item.sequence, rows, head], scratch.cotangents_full.at[slot]
        plgpu.copy_gmem_to_smem(source, scratch.cotangents.at[slot], full)

    def add(self, lengths: Lengths, turns: Any, target: Any, scratch: Scratch) -> None:
        """Accumulates the query gradients of the steps, in descending order of key blocks.

        `turns` counts, for each tile of queries of each head, the blocks of keys that have been added.
        """
        tiles = self.tiles
        if "h" in self.schedule.ablate:
            return

        def one(item: Item, position: Any) -> Any:
            offset, keys = lengths.offsets[item.sequence], lengths.keys[item.sequence]

            def add(head: Any, tile: Any, _step: Any) -> None:
                before = tiles.last_block(offset, keys, tile) - item.block
                turn = turns.at[(item.sequence * tiles.heads * tiles.group + head) * tiles.across + tile]
                for index in range(self.rounds):
                    at = (position + _step) * self.rounds + index
                    slot = lax.rem(at, self.schedule.sum_stages)
                    plgpu.barrier_wait(scratch.sums_full.at[slot])

                    @pl.when(before == 0)
                    def _(index: int = index) -> None:
                        self.send(item, head, tile, target, None, range(PARTS), index, scratch, slot)

                    @pl.when(before > 0)
                    def _(index: int = index) -> None:
                        if index == 0 and "w" not in self.schedule.ablate:
                            plgpu.semaphore_wait(turn, before, decrement=False, memory_scope="gpu")
                        if "a" not in self.schedule.ablate:
                            self.send(item, head, tile, target, None if "t" in self.schedule.ablate else "add", range(PARTS), index, scratch, slot)

                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(scratch.sums_free.at[slot])
                if "s" not in self.schedule.ablate:
                    plgpu.wait_smem_to_gmem(0)
                    plgpu.semaphore_signal(turn, 1, memory_scope="gpu")

            self.each_tile(item, add)
            return position + item.count * self.tiles.group

        self.over_items(lengths, jnp.int32(0), one)

    def send(
        self, item: Item, head: Any, tile: Any, target: Any, reduction: Any, parts: Iterable[Any], index: int, scratch: Scratch, slot: Any = 0
    ) -> None:
        """Starts to store or add the pieces of a round of a tile's gradient in GPU memory (B, T, H)."""
        for part in parts:
            row, columns = self.place(part, index)
            rows = pl.ds(tile * self.tiles.rows + row, ROWS)
            if self.schedule.flat and not self.call.interpret:
                place = target.at[item.sequence, head, tile, part]
            else:
                place = target.at[item.sequence, rows, head, columns]
            plgpu.copy_smem_to_gmem(scratch.sums.at[slot, part], place, reduction_op=reduction)

    def place(self, part: Any, index: int) -> tuple[Any, Any]:
        """Returns the first query and the columns that a warpgroup passes on in a round."""
        row, column = self.piece(part)
        return row * ROWS, pl.ds(column * ROWS, ROWS)

    def piece(self, part: Any) -> tuple[Any, Any]:
        """Returns which piece of 64 queries and 64 columns of a tile's gradient a warpgroup computes."""
        return (0, part) if self.call.columns > 1 else (part, 0)

    def compute(self, slopes: Any, lengths: Lengths, results: Results, scratch: Scratch) -> None:
        """Computes the gradients of this warpgroup's keys of all items, and of all queries that see them."""
        part, interpret = lax.axis_index("warpgroup"), bool(self.call.interpret)

        def one(item: Item, position: Any) -> Any:
            plgpu.barrier_wait(scratch.cache_full)
            not_zero_filled = scratch.marks[1, 0] != 0
            pl.when(not_zero_filled)(partial(self.zero_fill_keys, part, scratch))
            steps = item.count * self.tiles.group

            end = item.first + item.count
            # Blocks with non-finite keys always need the mask.
            whole_first, whole_end = (jnp.where(not_zero_filled, end, x) for x in (item.whole_first, item.whole_end))

            def step_at(index: Any, tile: Any, slopes: Any = slopes) -> Step:
                at = position + index
                masked = (tile < whole_first) | (tile >= whole_end)
                head = slope = None
                if interpret or slopes is not None:
                    head = item.head * self.tiles.group + lax.div(index, jnp.maximum(item.count, 1))
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
                    masked=masked,
                )

            def step(index: Any, carry: Any) -> Any:
                tile, *found = carry
                following = jnp.where(tile + 1 == end, item.first, tile + 1)
                if self.early:
                    more = index + 1 < steps
                    found = self.early_step(
                        step_at(index, tile), more, partial(step_at, index + 1, following, None), lengths, results, scratch, *found
                    )
                else:
                    found = self.one_step(step_at(index, tile), lengths, results, scratch, *found)
                return following, *found

            if self.early:
                scores = self.early_scores(step_at(jnp.int32(0), item.first, None), steps > 0, scratch)
                scores = finish(0, *scores, interpret=interpret)
                start = item.first, filled((ROWS, self.call.size), 0), filled((ROWS, self.call.size), 0), *scores
                _, dk, dv, *_ = lax.fori_loop(0, steps, step, start)
                if self.schedule.late:
                    self.last_sums(step_at(steps - 1, end - 1), steps > 0, results, scratch)
            else:
                start = item.first, *self.start()
                _, dk, dv, *left = lax.fori_loop(0, steps, step, start)
                for sums in left if not interpret else ():
                    pl.when(steps > 0)(partial(self.hand_on, position + steps - 1, part, sums, scratch))
            self.store(item, part, dk, dv, results, scratch)
            return position + steps

        steps = self.over_items(lengths, jnp.int32(0), one)
        if not self.call.interpret and "h" not in self.schedule.ablate:
            drain((scratch.sums_free,), self.schedule.sum_stages, steps * self.rounds)

    def start(self) -> tuple[jax.Array, ...]:
        """Returns the initial state of an item's steps: gradients of keys and values, pending query gradients."""
        keys = (ROWS, self.call.size)
        return filled(keys, 0), filled(keys, 0), filled((ROWS, ROWS), 0)

    def keys_of(self, part: Any) -> Any:
        """Returns which 64 keys of a block a warpgroup has."""
        return part

    def meet(self, scratch: Scratch) -> None:
        """Waits for the other warpgroup that computes."""
        plgpu.barrier_arrive(scratch.together)
        plgpu.barrier_wait(scratch.together)

    def zero_fill_keys(self, part: Any, scratch: Scratch) -> None:
        """Zero-fills keys that are not finite, since zero slopes would not mask them."""
        bad = plgpu.load(scratch.marks.at[0, pl.ds(part * ROWS, ROWS)], layout=TILE.reduce(1), optimized=False)
        for column in range(self.call.columns):
            zero_rows(scratch.keys.at[column, part], bad)
        plgpu.commit_smem()
        self.meet(scratch)

    def zero_fill_queries(self, step: Step, scratch: Scratch) -> None:
        """Zero-fills queries and cotangents of rows with non-finite numbers: one array per warpgroup."""
        for row in range(self.call.rows):
            rows = pl.ds(row * ROWS, ROWS)
            numbers = (
                plgpu.load(scratch.stats.at[step.slot, number, rows], layout=TILE.reduce(1), optimized=False)
                for number in range(STATS - 1)
            )
            bad = sum(jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0) for x in numbers)
            for part, x in enumerate((scratch.queries, scratch.cotangents)):

                @pl.when(step.part == part)
                def _(x: Any = x, rows: Any = rows, bad: Any = bad) -> None:
                    for column in range(self.call.columns):
                        zero_rows(x.at[step.slot, rows, pl.ds(column * ROWS, ROWS)], bad)

        plgpu.commit_smem()
        self.meet(scratch)

    def one_step(
        self, step: Step, lengths: Lengths, results: Results, scratch: Scratch, dk: Any, dv: Any, sums: Any = None
    ) -> tuple[jax.Array, ...]:
        """Processes a tile of queries.

        The tensor core always has a product queued: the keys' gradient while waiting for the other warpgroup's slopes,
        the next scores while the query gradients are passed on.

        Returns:
            `dk` and `dv` with what the tile adds, and this warpgroup's piece of the gradient of the tile's queries,
            which is passed on in the next step.
        """
        interpret, dtype = bool(self.call.interpret), scratch.queries.dtype
        plgpu.barrier_wait(scratch.queries_full.at[step.slot])
        plgpu.barrier_wait(scratch.cotangents_full.at[step.slot])
        not_zero_filled = step.masked & (scratch.stats[step.slot, 2, 0] != 0)
        pl.when(not_zero_filled)(partial(self.zero_fill_queries, step, scratch))
        # A zero opaque to ptxas: constant addresses would be spilled to local memory.
        part, half = step.part + (step.position >> NEVER), lax.rem(step.position, 2)
        queries, cotangents = scratch.queries.at[step.slot], scratch.cotangents.at[step.slot]
        keys = tuple(scratch.keys.at[column, part] for column in range(self.call.columns))
        pieces = [pl.ds(row * ROWS, ROWS) for row in range(self.call.rows)]
        scores, raised = [], []
        for row, piece in enumerate(pieces):
            scores.append(start(None, keys, (queries.at[piece],), interpret=interpret))
            if row == 0 and not interpret:
                pl.when(step.index > 0)(partial(self.hand_on, step.position - 1, part, sums, scratch))
            raised.append(start(None, (scratch.values.at[part],), (cotangents.at[piece],), interpret=interpret))
        newer = 2 * len(pieces) - 1  # products started after the awaited one
        for row, piece in enumerate(pieces):
            (found,) = finish(newer, scores[row], interpret=interpret)
            weights, bent = self.weights(step, row, lengths, found, scratch)
            if self.schedule.narrow_cond:
                rounded = self.math.rounded_not_negative(weights, dtype)
            else:
                rounded = lax.cond(step.masked, lambda x: jnp.maximum(x, 0.0), lambda x: x, weights).astype(dtype)
            (found,) = finish(newer - 1, raised[row], interpret=interpret)
            dv = start(dv, rounded, (cotangents.at[piece],), right_along=False, interpret=interpret)
            found = found - self.numbers(step, row, 1, scratch)
            found = lax.cond(step.masked, lambda x, w=bent: jnp.where(w < 0, 0.0, x), lambda x: x, found)
            slopes = self.math.product(bent, found).astype(dtype)
            share(slopes, scratch.slopes.at[half, part, row], interpret)
            dk = start(dk, slopes, (queries.at[piece],), right_along=False, interpret=interpret)
        plgpu.barrier_arrive(scratch.together)
        plgpu.barrier_wait(scratch.together)
        row, column = self.piece(part)
        sums = start(
            None,
            tuple(scratch.slopes.at[half, other, row] for other in range(PARTS)),
            tuple(scratch.keys.at[column, other] for other in range(PARTS)),
            left_along=False,
            right_along=False,
            interpret=interpret,
        )
        dk, dv, sums = finish(0, dk, dv, sums, interpret=interpret)
        sums = self.math.scaled(sums, 1.0)
        plgpu.barrier_arrive(scratch.stage_free.at[step.slot])
        if interpret:  # which has neither memory reductions nor semaphores
            self.store_sums(step, 0, sums, results, scratch)
        return dk, dv, sums

    @property
    def early(self) -> bool:
        return self.schedule.early

    def prepare(self, step: Step, scratch: Scratch) -> None:
        """Waits for a tile of queries with its cotangents."""
        plgpu.barrier_wait(scratch.queries_full.at[step.slot])
        plgpu.barrier_wait(scratch.cotangents_full.at[step.slot])
        not_zero_filled = step.masked & (scratch.stats[step.slot, 2, 0] != 0)
        pl.when(not_zero_filled)(partial(self.zero_fill_queries, step, scratch))

    def wide_pieces(self) -> list[Any]:
        width = self.tiles.rows if self.schedule.wide else ROWS
        return [pl.ds(row, width) for row in range(0, self.tiles.rows, width)]

    def early_scores(self, step: Step, more: Any, scratch: Scratch, otherwise: Any = None) -> tuple[jax.Array, ...]:
        """Starts the scores of a step."""
        interpret = bool(self.call.interpret)
        pl.when(more)(partial(self.prepare, step, scratch))
        slot = step.slot if otherwise is None else jnp.where(more, step.slot, otherwise)
        part = step.part + (step.position >> NEVER)
        queries = scratch.queries.at[slot]
        keys = tuple(scratch.keys.at[column, part] for column in range(self.call.columns))

        def all_pieces() -> tuple[jax.Array, ...]:
            return tuple(start(None, keys, (queries.at[piece],), interpret=interpret) for piece in self.wide_pieces())

        if not interpret:
            return all_pieces()
        nothing = tuple(filled((ROWS, piece.size), 0) for piece in self.wide_pieces())
        return lax.cond(more, all_pieces, lambda: nothing)

    def early_step(
        self, step: Step, more: Any, following: Any, lengths: Lengths, results: Results, scratch: Scratch,
        dk: Any, dv: Any, *scores: Any
    ) -> tuple[jax.Array, ...]:
        interpret, dtype = bool(self.call.interpret), scratch.queries.dtype
        part, half = step.part + (step.position >> NEVER), lax.rem(step.position, self.schedule.slope_stages)
        queries, cotangents = scratch.queries.at[step.slot], scratch.cotangents.at[step.slot]
        pieces = [pl.ds(row * ROWS, ROWS) for row in range(self.call.rows)]
        wide = self.wide_pieces()
        count = [0]

        def started(x: Any) -> Any:
            count[0] += 1
            return count[0] - 1, x

        def done(which: Any) -> Any:
            (found,) = finish(count[0] - 1 - which[0], which[1], interpret=interpret)
            return found

        raised = [
            started(start(None, (scratch.values.at[part],), (cotangents.at[piece],), interpret=interpret))
            for piece in wide
        ]
        ready: dict[Any, Any] = {}

        def cut(name: str, given: Any, row: int) -> Any:
            if not self.schedule.wide:
                return given[row] if name == "scores" else done(given[row])
            if name not in ready:
                ready[name] = given[0] if name == "scores" else done(given[0])
            return ready[name][:, row * ROWS : (row + 1) * ROWS]

        for row, piece in enumerate(pieces):
            found = cut("scores", scores, row)
            weights, bent = self.weights(step, row, lengths, found, scratch)
            if self.schedule.narrow_cond:
                rounded = self.math.rounded_not_negative(weights, dtype)
            else:
                rounded = lax.cond(step.masked, lambda x: jnp.maximum(x, 0.0), lambda x: x, weights).astype(dtype)
            found = cut("raised", raised, row)
            _, dv = started(start(dv, rounded, (cotangents.at[piece],), right_along=False, interpret=interpret))
            found = found - self.numbers(step, row, 1, scratch)
            found = lax.cond(step.masked, lambda x, w=bent: jnp.where(w < 0, 0.0, x), lambda x: x, found)
            slopes = self.math.product(bent, found).astype(dtype)
            if row == 0 and self.schedule.slope_stages == 1:
                pl.when(step.position > 0)(lambda: plgpu.barrier_wait(scratch.slopes_free))
            if row == 0 and self.schedule.late:

                @pl.when(step.index > 0)
                def _() -> None:
                    plgpu.barrier_wait(scratch.slopes_full)
                    plgpu.barrier_wait(scratch.slopes_free)

            share(slopes, scratch.slopes.at[half, part, row], interpret)
            _, dk = started(start(dk, slopes, (queries.at[piece],), right_along=False, interpret=interpret))
            if row == 0 and self.schedule.late:
                sums = started(self.query_sums(step, part, 1 - half, step.index > 0, scratch))
        if self.schedule.late:
            plgpu.barrier_arrive(scratch.slopes_full)
        else:
            plgpu.barrier_arrive(scratch.together)
            plgpu.barrier_wait(scratch.together)
            sums = started(self.query_sums(step, part, half, True, scratch))
        if self.schedule.late and self.call.rows > 1:
            (found,) = finish(count[0] - 1 - sums[0], sums[1], interpret=interpret)
            return self.late_end(step, more, following, results, scratch, dk, dv, found)
        sums = sums[1]
        dk, dv = finish(1, dk, dv, interpret=interpret)
        scores = self.early_scores(following(), more, scratch, step.slot)
        (sums,) = finish(len(scores), sums, interpret=interpret)
        sums = self.math.scaled(sums, 1.0)
        plgpu.barrier_arrive(scratch.stage_free.at[step.slot])
        if self.schedule.slope_stages == 1 or self.schedule.late:
            plgpu.barrier_arrive(scratch.slopes_free)
        if self.schedule.late:
            pl.when(step.index > 0)(partial(self.pass_on, self.before(step), part, sums, results, scratch))
        else:
            self.pass_on(step, part, sums, results, scratch)
        return dk, dv, *finish(0, *scores, interpret=interpret)

    def late_end(self, step: Step, more: Any, following: Any, results: Results, scratch: Scratch, dk: Any, dv: Any, sums: Any) -> Any:
        interpret = bool(self.call.interpret)
        part = step.part + (step.position >> NEVER)
        sums = self.math.scaled(sums, 1.0)
        plgpu.barrier_arrive(scratch.slopes_free)
        pl.when(step.index > 0)(partial(self.pass_on, self.before(step), part, sums, results, scratch))
        (dv,) = finish(1, dv, interpret=interpret)
        scores = self.early_scores(following(), more, scratch, step.slot)
        (dk,) = finish(len(scores), dk, interpret=interpret)
        plgpu.barrier_arrive(scratch.stage_free.at[step.slot])
        return dk, dv, *finish(0, *scores, interpret=interpret)

    def before(self, step: Step) -> Step:
        first = step.tile == step.item.first
        last = step.item.first + step.item.count - 1
        head = step.head
        if head is not None:
            head = jnp.where(first, jnp.maximum(head - 1, 0), head)
        return step._replace(tile=jnp.where(first, last, step.tile - 1), head=head, index=step.index - 1, position=step.position - 1)

    def pass_on(self, step: Step, part: Any, sums: Any, results: Results, scratch: Scratch) -> None:
        if self.call.interpret:  # which has neither memory reductions nor semaphores
            self.store_sums(step, 0, sums, results, scratch)
        else:
            self.hand_on(step.position, part, sums, scratch)

    def last_sums(self, step: Step, some: Any, results: Results, scratch: Scratch) -> None:
        @pl.when(some)
        def _() -> None:
            plgpu.barrier_wait(scratch.slopes_full)
            plgpu.barrier_wait(scratch.slopes_free)
            part, half = step.part + (step.position >> NEVER), lax.rem(step.position, self.schedule.slope_stages)
            (sums,) = finish(0, self.query_sums(step, part, half, True, scratch), interpret=bool(self.call.interpret))
            self.pass_on(step, part, self.math.scaled(sums, 1.0), results, scratch)

    def query_sums(self, step: Step, part: Any, half: Any, some: Any, scratch: Scratch) -> jax.Array:
        interpret = bool(self.call.interpret)
        row, column = self.piece(part)

        def product() -> jax.Array:
            return start(
                None,
                tuple(scratch.slopes.at[half, other, row] for other in range(PARTS)),
                tuple(scratch.keys.at[column, other] for other in range(PARTS)),
                left_along=False,
                right_along=False,
                interpret=interpret,
            )

        if not interpret or some is True:
            return product()
        return lax.cond(some, product, lambda: filled((ROWS, ROWS), 0))

    def store_sums(self, step: Step, index: int, sums: jax.Array, results: Results, scratch: Scratch) -> None:
        """Writes the sums that a warpgroup would pass on in a round to the key block's own slice."""
        scratch.sums.at[0, step.part][...] = sums
        plgpu.commit_smem()
        target = results.query.at[step.item.block]
        self.send(step.item, step.head, step.tile, target, None, [step.part], index, scratch)
        plgpu.wait_smem_to_gmem(0)

    def numbers(self, step: Step, row: int, which: int, scratch: Scratch) -> jax.Array:
        """Returns a number of each of 64 queries of a tile, broadcast over the keys (64, 64)."""
        own = scratch.stats.at[step.slot, which, pl.ds(row * ROWS, ROWS)]
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
            own = scratch.marks.at[0, pl.ds(step.keys * ROWS, ROWS)]
            marks = plgpu.load(own, layout=TILE.reduce(1), optimized=False)
            weights = jnp.where(lax.broadcast_in_dim(marks, weights.shape, [0]) != 0, jnp.nan, weights)
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

    def hand_on(self, position: Any, part: Any, sums: jax.Array, scratch: Scratch) -> None:
        """Passes this warpgroup's piece of the query gradient of a step to the accumulating warpgroup."""
        stages = self.schedule.sum_stages
        slot = lax.rem(position, stages)
        if "h" in self.schedule.ablate:
            return
        pl.when(position >= stages)(lambda: plgpu.barrier_wait(scratch.sums_free.at[slot]))
        if self.schedule.flat:
            share_in_order(sums, scratch.sums.at[slot, part])
        else:
            share(sums, scratch.sums.at[slot, part], bool(self.call.interpret))
        plgpu.barrier_arrive(scratch.sums_full.at[slot])

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


def zero_rows(ref: Any, bad: jax.Array) -> None:
    """Zero-fills the rows of a tile (64, n) in shared memory where `bad` (64,) is not 0."""
    found = plgpu.load(ref, layout=TILE)
    ref[...] = jnp.where(lax.broadcast_in_dim(bad, found.shape, [0]) != 0, jnp.zeros((), found.dtype), found)
