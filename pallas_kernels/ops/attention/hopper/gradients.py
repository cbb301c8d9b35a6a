"""The gradients of attention in one kernel: a block of 128 keys at a time, over the tiles of queries that see it.

Two warpgroups have 64 keys each, with the gradients of keys and values in registers; a third one fetches tiles of
queries. The gradient of a tile of queries is a sum over blocks of keys, which belong to different blocks of the grid. A
fourth warpgroup adds to it in memory, when the block of keys behind its own has been added.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.hopper._gradient_tiles import Item, Tiles
from pallas_kernels.ops.attention.hopper._scores import Scoring
from pallas_kernels.ops.attention.hopper.prefill import Lengths
from pallas_kernels.parts.hopper.band import keep_band
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, filled, tiled
from pallas_kernels.schedule.hopper.attention import GradientSchedule

PARTS: Final = 2
"""Warpgroups that compute; each has 64 keys of a block."""

STATS: Final = 3
"""Numbers of a query: minus its log-sum-exp to base 2, the sum of output times cotangent, whether its tile is bad."""

_NEVER: Final = 30  # no block of the grid takes 2 ** 30 steps

MARKS: Final = 2
"""Numbers for each key: whether it is not finite, and whether any key of its block is not."""


@dataclass(frozen=True)
class GradientCall:
    """What is fixed about a call.

    Attributes:
        tiles: The tiles of queries and blocks of keys.
        scale: Factor of the scores.
        scoring: From products to scores.
        size: Width of a head.
        interpret: False, or parameters of Mosaic's interpreter.
    """

    tiles: Tiles
    scale: float
    scoring: Scoring
    size: int
    interpret: Any

    @property
    def columns(self) -> int:
        """Pieces of 64 columns of a head."""
        return self.size // ROWS

    @property
    def rows(self) -> int:
        """Pieces of 64 queries of a tile."""
        return self.tiles.rows // ROWS


class Operands(NamedTuple):
    """Arrays in GPU memory: (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H), and numbers of queries and keys.

    Slopes (B or 1, N) are float32 and times log2(e); None where there are none.
    """

    query: Any
    key: Any
    value: Any
    cotangent: Any
    stats: Any
    marks: Any
    slopes: Any = None


class Results(NamedTuple):
    """Gradients in GPU memory; in the interpreter that of queries has a part for each block of keys."""

    query: Any
    key: Any
    value: Any


class Scratch(NamedTuple):
    """Shared memory and barriers.

    Attributes:
        keys: (H / 64, 2, 64, 64), pieces of columns and rows.
        values: (2, 64, H).
        marks: (2, 128) float32.
        queries: (stages, rows, H).
        cotangents: (stages, rows, H).
        stats: (stages, 3, rows) float32.
        slopes: (2, 2, rows / 64, 64, 64), of keys (rows) and queries (columns), twice.
        sums: (2, 64, 64) float32, what is to be added to the gradient of queries.
        cache_full: Barrier of keys, values and marks.
        queries_full: Barriers of queries and stats.
        cotangents_full: Barriers of cotangents.
        sums_full: Barrier.
        cache_free: Barrier.
        stage_free: Barriers of queries, stats and cotangents.
        sums_free: Barrier.
        together: Barrier of the warpgroups that compute.
    """

    keys: Any
    values: Any
    marks: Any
    queries: Any
    cotangents: Any
    stats: Any
    slopes: Any
    sums: Any
    cache_full: Any
    queries_full: Any
    cotangents_full: Any
    sums_full: Any
    cache_free: Any
    stage_free: Any
    sums_free: Any
    together: Any


class Step(NamedTuple):
    """A tile of queries of one head beside a block of keys.

    Attributes:
        item: The block of keys.
        head: Index of the query head; None where nothing needs it, which saves a division.
        slope: (64,) float32, minus the slope of the head; None without slopes.
        tile: Index of the tile.
        slot: Stage of the queries.
        index: Number of the steps before with this block of keys.
        position: Number of the steps before in this block of the grid.
        part: This warpgroup, and its 64 keys.
        masked: Whether some query does not see some key, or some key is not finite.
    """

    item: Item
    head: Any
    slope: Any
    tile: Any
    slot: Any
    index: Any
    position: Any
    part: Any
    masked: Any


@dataclass(frozen=True)
class Body:
    """The kernel's program."""

    call: GradientCall
    schedule: GradientSchedule

    @property
    def tiles(self) -> Tiles:
        """The tiles of the call."""
        return self.call.tiles

    @property
    def math(self) -> Arithmetic:
        """The instructions on tiles of 64 rows."""
        return Arithmetic(interpret=bool(self.call.interpret))

    def walk(self, lengths: Lengths, start: Any, one: Any) -> Any:
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

    def produce(self, given: Operands, lengths: Lengths, scratch: Scratch) -> None:
        """Fetches keys and values of all items, and the tiles of queries that see them."""
        tiles, stages = self.tiles, self.schedule.stages

        def one(item: Item, carry: Any) -> Any:
            done, position = carry
            pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch.cache_free))
            start = item.block * tiles.block
            for part in range(PARTS):
                rows = pl.ds(start + part * ROWS, ROWS)
                for column in range(self.call.columns):
                    source = given.key.at[item.sequence, rows, item.head, pl.ds(column * ROWS, ROWS)]
                    plgpu.copy_gmem_to_smem(source, scratch.keys.at[column, part], scratch.cache_full)
                source = given.value.at[item.sequence, rows, item.head]
                plgpu.copy_gmem_to_smem(source, scratch.values.at[part], scratch.cache_full)
            marks = given.marks.at[item.sequence, item.head, :, pl.ds(start, tiles.block)]
            plgpu.copy_gmem_to_smem(marks, scratch.marks, scratch.cache_full)

            def fetch(head: Any, index: Any, step: Any) -> None:
                slot, first = lax.rem(position + step, stages), index * tiles.rows
                pl.when(position + step >= stages)(lambda: plgpu.barrier_wait(scratch.stage_free.at[slot]))
                rows = pl.ds(first, tiles.rows)
                stats = given.stats.at[item.sequence, head, :, rows]
                plgpu.copy_gmem_to_smem(stats, scratch.stats.at[slot], scratch.queries_full.at[slot])
                source = given.query.at[item.sequence, rows, head]
                plgpu.copy_gmem_to_smem(source, scratch.queries.at[slot], scratch.queries_full.at[slot])
                source = given.cotangent.at[item.sequence, rows, head]
                plgpu.copy_gmem_to_smem(source, scratch.cotangents.at[slot], scratch.cotangents_full.at[slot])

            self.each_tile(item, fetch)
            return done + 1, position + item.count * tiles.group

        position = self.walk(lengths, (jnp.int32(0), jnp.int32(0)), one)[1]
        plgpu.barrier_wait(scratch.cache_free)

        @pl.loop(0, jnp.minimum(position, stages))
        def _(i: Any) -> None:
            plgpu.barrier_wait(scratch.stage_free.at[lax.rem(jnp.maximum(position - stages, 0) + i, stages)])

    def add(self, lengths: Lengths, turns: Any, target: Any, scratch: Scratch) -> None:
        """Adds what a step gives to the gradient of its queries, blocks of keys downwards.

        `turns` counts, for each tile of queries of each head, the blocks of keys that have been added.
        """
        tiles = self.tiles

        def one(item: Item, position: Any) -> Any:
            offset, keys = lengths.offsets[item.sequence], lengths.keys[item.sequence]

            def add(head: Any, tile: Any, _step: Any) -> None:
                before = tiles.last_block(offset, keys, tile) - item.block
                plgpu.barrier_wait(scratch.sums_full)
                turn = turns.at[(item.sequence * tiles.heads * tiles.group + head) * tiles.across + tile]

                @pl.when(before == 0)
                def _() -> None:
                    self.send(item, tile, target.at[:, :, head], None, range(PARTS), scratch)

                @pl.when(before > 0)
                def _() -> None:
                    plgpu.semaphore_wait(turn, before, decrement=False, memory_scope="gpu")
                    self.send(item, tile, target.at[:, :, head], "add", range(PARTS), scratch)

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(scratch.sums_free)
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(turn, 1, memory_scope="gpu")

            self.each_tile(item, add)
            return position

        self.walk(lengths, jnp.int32(0), one)

    def send(self, item: Item, tile: Any, target: Any, reduction: Any, parts: Iterable[Any], scratch: Scratch) -> None:
        """Starts to store, or to add, pieces of a tile's gradient to GPU memory (B, T, H)."""
        for part in parts:
            row, column = self.piece(part)
            rows = pl.ds(tile * self.tiles.rows + row * ROWS, ROWS)
            place = target.at[item.sequence, rows, pl.ds(column * ROWS, ROWS)]
            plgpu.copy_smem_to_gmem(scratch.sums.at[part], place, reduction_op=reduction)

    def piece(self, part: Any) -> tuple[Any, Any]:
        """Returns which piece of 64 queries and 64 columns of a tile's gradient a warpgroup computes."""
        return (0, part) if self.call.columns > 1 else (part, 0)

    def compute(self, slopes: Any, lengths: Lengths, results: Results, scratch: Scratch) -> None:
        """Computes the gradients of this warpgroup's keys of all items, and of all queries that see them."""
        part, interpret = lax.axis_index("warpgroup"), bool(self.call.interpret)

        def one(item: Item, position: Any) -> Any:
            plgpu.barrier_wait(scratch.cache_full)
            unclean = scratch.marks[1, 0] != 0
            pl.when(unclean)(partial(self.clean_keys, part, scratch))
            steps = item.count * self.tiles.group

            end = item.first + item.count
            # Keys that are not finite are seen by none as a whole.
            whole_first, whole_end = (jnp.where(unclean, end, x) for x in (item.whole_first, item.whole_end))

            def step(index: Any, carry: Any) -> Any:
                tile, dk, dv, sums = carry
                at = position + index
                masked = (tile < whole_first) | (tile >= whole_end)
                head = slope = None
                if interpret or slopes is not None:
                    head = item.head * self.tiles.group + lax.div(index, jnp.maximum(item.count, 1))
                if slopes is not None:
                    number = slopes[item.sequence if slopes.shape[0] > 1 else 0, head]
                    slope = plgpu.layout_cast(jnp.full((ROWS,), -number, jnp.float32), TILE.reduce(1))
                taken = Step(item, head, slope, tile, lax.rem(at, self.schedule.stages), index, at, part, masked)
                dk, dv, sums = self.one_step(taken, lengths, results, scratch, dk, dv, sums)
                return jnp.where(tile + 1 == end, item.first, tile + 1), dk, dv, sums

            keys, piece = (ROWS, self.call.size), (ROWS, ROWS)
            start = item.first, filled(keys, 0), filled(keys, 0), filled(piece, 0)
            _, dk, dv, sums = lax.fori_loop(0, steps, step, start)
            if not interpret:
                pl.when(steps > 0)(partial(self.hand_on, position + steps - 1, part, sums, scratch))
            self.store(item, part, dk, dv, results, scratch)
            return position + steps

        steps = self.walk(lengths, jnp.int32(0), one)
        if not self.call.interpret:
            pl.when(steps > 0)(lambda: plgpu.barrier_wait(scratch.sums_free))

    def meet(self, scratch: Scratch) -> None:
        """Waits for the other warpgroup that computes."""
        plgpu.barrier_arrive(scratch.together)
        plgpu.barrier_wait(scratch.together)

    def clean_keys(self, part: Any, scratch: Scratch) -> None:
        """Writes zeros to keys that are not finite: their slopes of zero would keep them."""
        bad = plgpu.load(scratch.marks.at[0, pl.ds(part * ROWS, ROWS)], layout=TILE.reduce(1), optimized=False)
        for column in range(self.call.columns):
            _zero_rows(scratch.keys.at[column, part], bad)
        plgpu.commit_smem()
        self.meet(scratch)

    def clean_queries(self, step: Step, scratch: Scratch) -> None:
        """Writes zeros to queries and cotangents of rows whose numbers are not finite: one to each warpgroup."""
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
                        _zero_rows(x.at[step.slot, rows, pl.ds(column * ROWS, ROWS)], bad)

        plgpu.commit_smem()
        self.meet(scratch)

    def one_step(
        self, step: Step, lengths: Lengths, results: Results, scratch: Scratch, dk: Any, dv: Any, sums: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Takes a tile of queries.

        The tensor core always has a product waiting: those of the keys' gradient while the other warpgroup's slopes
        are on their way, the next scores while what they gave to the queries is handed on.

        Returns:
            `dk` and `dv` with what the tile adds, and this warpgroup's piece of the gradient of the tile's queries,
            which is handed on in the next step.
        """
        interpret, dtype = bool(self.call.interpret), scratch.queries.dtype
        plgpu.barrier_wait(scratch.queries_full.at[step.slot])
        plgpu.barrier_wait(scratch.cotangents_full.at[step.slot])
        unclean = step.masked & (scratch.stats[step.slot, 2, 0] != 0)
        pl.when(unclean)(partial(self.clean_queries, step, scratch))
        # A zero that ptxas does not know: addresses that stay the same would be kept in local memory.
        part, half = step.part + (step.position >> _NEVER), lax.rem(step.position, 2)
        queries, cotangents = scratch.queries.at[step.slot], scratch.cotangents.at[step.slot]
        keys = tuple(scratch.keys.at[column, part] for column in range(self.call.columns))
        pieces = [pl.ds(row * ROWS, ROWS) for row in range(self.call.rows)]
        scores, raised = [], []
        for row, piece in enumerate(pieces):
            scores.append(start(None, keys, (queries.at[piece],), interpret=interpret))
            if row == 0 and not interpret:
                pl.when(step.index > 0)(partial(self.hand_on, step.position - 1, part, sums, scratch))
            raised.append(start(None, (scratch.values.at[part],), (cotangents.at[piece],), interpret=interpret))
        behind = 2 * len(pieces) - 1  # products that were started later than the one that is waited for
        for row, piece in enumerate(pieces):
            (found,) = finish(behind, scores[row], interpret=interpret)
            weights, bent = self.weights(step, row, lengths, found, scratch)
            rounded = lax.cond(step.masked, lambda x: jnp.maximum(x, 0.0), lambda x: x, weights).astype(dtype)
            (found,) = finish(behind - 1, raised[row], interpret=interpret)
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
        if interpret:  # which neither adds to memory nor has semaphores
            scratch.sums.at[part][...] = sums
            plgpu.commit_smem()
            self.send(step.item, step.tile, results.query.at[step.item.block, :, :, step.head], None, [part], scratch)
            plgpu.wait_smem_to_gmem(0)
        return dk, dv, sums

    def numbers(self, step: Step, row: int, which: int, scratch: Scratch) -> jax.Array:
        """Returns a number of each of 64 queries of a tile, for all keys (64, 64)."""
        own = scratch.stats.at[step.slot, which, pl.ds(row * ROWS, ROWS)]
        x = plgpu.load(own, layout=TILE.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x, (ROWS, ROWS), [1])

    def weights(
        self, step: Step, row: int, lengths: Lengths, products: jax.Array, scratch: Scratch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of 64 keys (rows) for 64 queries of a tile, -1 where a key is not seen.

        A mask that is kept would take registers. Beside them the same weights, times the derivative of the soft cap.
        """

        def where_seen(*given: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(seen(weights) for weights in given)

        def seen(weights: jax.Array) -> jax.Array:
            own = scratch.marks.at[0, pl.ds(step.part * ROWS, ROWS)]
            marks = plgpu.load(own, layout=TILE.reduce(1), optimized=False)
            weights = jnp.where(lax.broadcast_in_dim(marks, weights.shape, [0]) != 0, jnp.nan, weights)
            first, last = self.tiles.seen(lengths, step.item, step.tile, step.part)
            return keep_band(weights, first - row * ROWS, last - row * ROWS, -1.0, bool(self.call.interpret))

        def start() -> jax.Array:
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=TILE.reduce(1))
            query = lengths.offsets[step.item.sequence] + step.tile * self.tiles.rows + row * ROWS
            return query - step.item.block * self.tiles.block - step.part * ROWS - key

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
        """Hands this warpgroup's piece of the gradient of a tile's queries, made in a step, to the one that adds it."""
        pl.when(position > 0)(lambda: plgpu.barrier_wait(scratch.sums_free))
        share(sums, scratch.sums.at[part], bool(self.call.interpret))
        plgpu.barrier_arrive(scratch.sums_full)

    def store(self, item: Item, part: Any, dk: jax.Array, dv: jax.Array, results: Results, scratch: Scratch) -> None:
        """Writes the gradients of this warpgroup's keys and values, over the keys and values in shared memory."""
        math, dtype = self.math, scratch.queries.dtype
        dk, dv = math.fused(dk, self.call.scale, 0.0), math.fused(dv, 1.0, 0.0)  # a zero is made positive
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


def _zero_rows(ref: Any, bad: jax.Array) -> None:
    """Writes zeros to the rows of a tile (64, 64) in shared memory where `bad` (64,) is not 0."""
    found = plgpu.load(ref, layout=TILE)
    ref[...] = jnp.where(lax.broadcast_in_dim(bad, (ROWS, ROWS), [0]) != 0, jnp.zeros((), found.dtype), found)


def gradients(
    given: Operands, lengths: Lengths, *, call: GradientCall, schedule: GradientSchedule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        given: Arrays (B, T, N, H) and (B, S, K, H), T and S multiples of 8; stats (B, N, 3, T') and marks
            (B, K, 2, S') float32, T' and S' being T and S rounded up to whole tiles and blocks.
        lengths: Numbers of each sequence.
        call: What is fixed about the call.
        schedule: Stages and registers.

    Returns:
        The gradient of queries (B, T', N, H), float32, before the factor `scale`, defined for tiles of queries that see
        any key; those of keys and values (B, S, K, H).
    """
    body, tiles, dtype = Body(call, schedule), call.tiles, given.query.dtype
    batch, _, heads, size = given.query.shape
    sums: tuple[int, ...] = (batch, tiles.across * tiles.rows, heads, size)
    if call.interpret:
        sums = (tiles.blocks, *sums)
    count = len([x for x in given if x is not None])

    def kernel(*refs: Any) -> None:
        operands, numbers, refs = Operands(*refs[:count]), Lengths(*refs[count : count + 3]), refs[count + 3 :]
        results, refs = Results(*refs[:3]), refs[3:]
        scratch = Scratch(*refs)
        warpgroup = lax.axis_index("warpgroup")
        turns = None
        if not call.interpret:
            turns = pl.get_global(plgpu.SemaphoreType.REGULAR((batch * heads * tiles.across,)))

        @pl.when(warpgroup < PARTS)
        def _() -> None:
            plgpu.set_max_registers(schedule.registers[0], action="increase")
            body.compute(operands.slopes, numbers, results, scratch)

        @pl.when(warpgroup == PARTS)
        def _() -> None:
            plgpu.set_max_registers(schedule.registers[1], action="decrease")
            body.produce(operands, numbers, scratch)

        if not call.interpret:

            @pl.when(warpgroup == PARTS + 1)
            def _() -> None:
                plgpu.set_max_registers(schedule.registers[1], action="decrease")
                body.add(numbers, turns, results.query, scratch)

    launch = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(sums, jnp.float32),
            *[jax.ShapeDtypeStruct(given.key.shape, dtype)] * 2,
        ],
        grid=(tiles.size,),
        grid_names=("block",),
        kernel_name="attention_gradients",
        num_threads=PARTS + (1 if call.interpret else 2),
        thread_name="warpgroup",
        scratch_types=_scratch(call, schedule, dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=call.interpret,
    )
    dq, dk, dv = launch(*given[:count], *lengths)
    if call.interpret:
        dq = _in_order(dq, lengths, tiles)
    return dq, dk, dv


def _in_order(parts: jax.Array, lengths: Lengths, tiles: Tiles) -> jax.Array:
    """Returns the sum over blocks of keys downwards of those that a tile of queries sees (blocks, B, T', N, H)."""
    first, last = tiles.blocks_of_tiles(lengths)
    total = jnp.zeros(parts.shape[1:], jnp.float32)
    for block in range(tiles.blocks - 1, -1, -1):
        inside = jnp.repeat((block >= first) & (block <= last), tiles.rows, axis=1)[..., None, None]
        total = jnp.where(inside, total + parts[block], total)
    return total


def _scratch(call: GradientCall, schedule: GradientSchedule, dtype: Any) -> list[Any]:
    """Returns the types of `Scratch`."""
    tiles, stages, size = call.tiles, schedule.stages, call.size
    cached = PARTS * (call.columns + 1) + 1
    return [
        plgpu.SMEM((call.columns, PARTS, ROWS, ROWS), dtype, transforms=tiled(dtype)),
        plgpu.SMEM((PARTS, ROWS, size), dtype, transforms=tiled(dtype)),
        plgpu.SMEM((MARKS, tiles.block), jnp.float32),
        *[plgpu.SMEM((stages, tiles.rows, size), dtype, transforms=tiled(dtype))] * 2,
        plgpu.SMEM((stages, STATS, tiles.rows), jnp.float32),
        plgpu.SMEM((2, PARTS, call.rows, ROWS, ROWS), dtype, transforms=tiled(dtype)),
        plgpu.SMEM((PARTS, ROWS, ROWS), jnp.float32, transforms=tiled(jnp.float32)),
        plgpu.Barrier(num_arrivals=cached),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=PARTS),
        plgpu.Barrier(num_arrivals=PARTS),
        plgpu.Barrier(num_arrivals=PARTS, num_barriers=stages),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=PARTS),
    ]
