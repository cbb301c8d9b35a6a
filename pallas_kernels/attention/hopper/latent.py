"""Latent attention: one key head of 576 columns, of which the first 512 are the values.

Three warpgroups: one computes scores, weights and the left half of the columns of the values, one the right half, one
copies. The weights of a block go from the first to the second through shared memory. `MmaAttentionContract` has the
formulas: the bits are those of the Triton kernel.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._column_sums import ColumnSums, add_weights, no_weights, total
from pallas_kernels.attention.hopper._decode_results import Place, store_rows
from pallas_kernels.attention.hopper._latent_items import Item, Items
from pallas_kernels.attention.hopper._merge_loop import padded_splits
from pallas_kernels.attention.hopper._not_finite import first_not_finite, mark_not_finite, zero_fill_values
from pallas_kernels.attention.hopper._online import LN2, Stats, merge_stats, no_keys, of_queries
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.band import keep_band
from pallas_kernels.attention.hopper.spilled import reload, reload_rows, spill, spill_rows
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.logarithm import log2
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.stages import await_free, drain
from pallas_kernels.parts.hopper.tile import ROWS, Arithmetic, across, filled, tiled

_NEVER: Final = 30  # no position is 2 ** 30
_PARTS: Final = 2  # warpgroups that share the columns of the values

PARAMETERS: Final = plgpu.CompilerParams(
    reduction_scratch_bytes=0,  # no reduction crosses warps
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)
"""How the kernel is compiled."""


class Memory(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
        queries: (1, 64, size).
        keys: Their columns in three arrays (stages, 64, width): the halves of the values, and the others.
        weights: (1, 64, 64), of a block of keys.
        numbers: (2, 64) float32, from the first warpgroup to the second: the decay of a block; at the end of a split
            the factors it is merged with, after the last one the inverse of the sum.
        marks: (2, 2, 1) int32: whether a warpgroup met what is not finite, for every second split.
        queries_full: A barrier.
        queries_free: A barrier.
        keys_full: A barrier for each stage, for the left half of the values and the others, and for the right half.
        keys_free: The same, at which the warpgroup arrives that reads a half last.
        scores_done: A barrier: the scores of a block are there, and the tensor core is free for the right half of the
            values of the block before it.
        weights_full: A barrier.
        weights_free: A barrier.
        split_ends: A barrier, at which the computing warpgroups meet.
    """

    queries: Any
    keys: Any
    weights: Any
    numbers: Any
    marks: Any
    queries_full: Any
    queries_free: Any
    keys_full: Any
    keys_free: Any
    weights_full: Any
    weights_free: Any
    scores_done: Any
    split_ends: Any

    @classmethod
    def types(cls, items: Items, dtype: Any) -> "Memory":
        """Returns the types."""
        stages, block = items.schedule.stages, items.contract.key_block
        return cls(
            queries=plgpu.SMEM((1, ROWS, items.size), dtype, transforms=tiled(dtype, items.size)),
            keys=tuple(
                plgpu.SMEM((stages, block, width), dtype, transforms=tiled(dtype, width)) for width in items.widths
            ),
            weights=plgpu.SMEM((1, ROWS, block), dtype, transforms=tiled(dtype, block)),
            numbers=plgpu.SMEM((2, ROWS), jnp.float32),
            marks=plgpu.SMEM((2, _PARTS, 1), jnp.int32),
            queries_full=plgpu.Barrier(),
            queries_free=plgpu.Barrier(),
            keys_full=tuple(
                plgpu.Barrier(num_arrivals=count * items.source.copies, num_barriers=stages) for count in (2, 1)
            ),
            keys_free=tuple(plgpu.Barrier(num_barriers=stages) for _ in range(_PARTS)),
            weights_full=plgpu.Barrier(),
            weights_free=plgpu.Barrier(),
            scores_done=plgpu.Barrier(),
            split_ends=plgpu.Barrier(num_arrivals=_PARTS),
        )


class State(NamedTuple):
    """What the first warpgroup knows after some blocks of a split."""

    values: jax.Array
    maximum: jax.Array
    sums: ColumnSums


@dataclass(frozen=True)
class Body:
    """The kernel's program, inside the kernel.

    Attributes:
        items: The items.
        refs: The arrays of the call, with queries as rows (B, R, size).
        out: Results, (B, R, V); or with items of one split their values, (B, splits, R, V) float32.
        numbers: The log-sum-exp (B, R); or maxima and sums, (B, 2, R, splits).
        held: (grid, 2, 64 * V / 2) float32, sums of values after the splits before; None unless there are several.
        memory: Shared memory and barriers.
    """

    items: Items
    refs: AttentionCall
    out: Any
    numbers: Any
    held: Any
    memory: Memory

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs in Mosaic's interpreter."""
        return bool(self.items.interpret)

    @property
    def math(self) -> Arithmetic:
        """The instructions on tiles of 64 rows."""
        return Arithmetic(interpret=self.interpret)

    @property
    def lengths(self) -> Lengths:
        """Limits of each sequence."""
        return Lengths(self.refs.limits)

    @property
    def half(self) -> int:
        """Columns of the values of a warpgroup."""
        return self.items.value_size // _PARTS

    # Copying.

    def produce(self) -> None:
        """Copies queries and keys of all items of this block of the grid."""
        m, items, block = self.memory, self.items, lax.axis_index("block")

        def one(index: Any, carry: Any) -> Any:
            position, done = carry
            item = items.item(self.lengths, block, index)
            first, last = item.blocks.first, item.blocks.last

            def fill(at: Any, pages: Any) -> Any:
                following = items.source.pages(self.refs.page_table, item.sequence, at + 1)
                place = position + (at - first)
                slot = self.slot(place)
                for columns, half in ((0, 0), (2, 0), (1, 1)):
                    if columns != 2:
                        await_free(place, items.schedule.stages, m.keys_free[half].at[slot])
                    keys, full = m.keys[columns].at[slot], m.keys_full[half].at[slot]
                    items.source.copy(self.columns(columns), pages, keys, full, item.sequence, at, 0)

                @pl.when(at == first)
                def _() -> None:
                    pl.when(done > 0)(partial(plgpu.barrier_wait, m.queries_free))
                    query: Any = self.refs.query
                    rows = query.at[item.sequence, pl.ds(item.tile * ROWS, items.loaded)]
                    plgpu.copy_gmem_to_smem(rows, m.queries.at[0, pl.ds(0, items.loaded)], m.queries_full)

                return following

            lax.fori_loop(first, last, fill, items.source.pages(self.refs.page_table, item.sequence, first))
            count = jnp.maximum(last - first, 0)
            return position + count, done + jnp.minimum(count, 1)

        position, done = lax.fori_loop(0, items.count_of(self.lengths, block), one, (jnp.int32(0), jnp.int32(0)))
        drain(m.keys_free, items.schedule.stages, position)
        pl.when(done > 0)(partial(plgpu.barrier_wait, m.queries_free))

    def columns(self, part: int) -> Any:
        """Returns the columns of all keys that `Memory.keys` has in an array."""
        key: Any = self.refs.key
        return key.at[:, :, :, pl.ds(part * self.half, self.items.widths[part])]

    # Computing.

    def compute(self, part: int) -> None:
        """Computes the scores and the left half of the values of all items (part 0), or the right half (part 1)."""
        items, block = self.items, lax.axis_index("block")
        if part == 0:
            for at in range(2):
                for i in range(_PARTS):
                    self.memory.marks[at, i, 0] = jnp.int32(0)
        else:
            plgpu.barrier_arrive(self.memory.weights_free)

        def one(index: Any, carry: Any) -> Any:
            position, turn = carry
            item = items.item(self.lengths, block, index)
            count = jnp.maximum(item.blocks.last - item.blocks.first, 0)
            if items.schedule.whole:
                turn = self.all_splits(part, item, position, turn)
            else:
                pl.when(count > 0)(partial(self.one_split, part, item, position, turn))
                turn = turn + jnp.minimum(count, 1)
            return position + count, turn

        lax.fori_loop(0, items.count_of(self.lengths, block), one, (jnp.int32(0), jnp.int32(0)))
        if part == 0:
            plgpu.barrier_wait(self.memory.weights_free)

    def one_split(self, part: int, item: Item, position: Any, turn: Any) -> None:
        """Computes the only split of an item and stores what it gives."""
        values, stats = self.split(part, item, item.split, position, turn)
        numbers = ((self.numbers.at[item.sequence, i, :, item.split], x) for i, x in enumerate(stats))
        self.store(part, item, self.out.at[item.sequence, item.split], values, tuple(numbers) if part == 0 else ())

    def all_splits(self, part: int, item: Item, position: Any, turn: Any) -> Any:
        """Computes all splits of an item and stores its results; returns the turn of the next split."""
        m, items = self.memory, self.items
        first, last = item.blocks.first, item.blocks.last
        splits = lax.div(last + (items.blocks_of_split - 1), items.blocks_of_split)

        def one(split: Any, carry: Any) -> Any:
            before = carry[1]
            done = items.of_split(item, split)[0] - first
            values, stats = self.split(part, item, split, position + done, turn + split)
            if items.splits == 1:
                return values, stats
            if part == 0:
                stats, kept, taken = merge_stats(before, stats, self.math)
                self.send((kept, taken))
            else:
                plgpu.barrier_wait(m.weights_full)
                kept, taken = reload_rows(m.numbers, self.interpret)
                plgpu.barrier_arrive(m.weights_free)
            held = self.held.at[lax.axis_index("block"), part]
            values = self.math.product(values, across(taken, self.half))

            def merged(values: jax.Array) -> jax.Array:
                old = reload(held, self.half, self.interpret)
                return self.math.fused(old, across(kept, self.half), values)

            values = lax.cond(split > 0, merged, lambda values: values, values)

            @pl.when(split + 1 < splits)
            def _() -> None:
                spill(values, across(kept, self.half), held, jnp.bool_(True), self.interpret)

            return values, stats

        values, stats = lax.fori_loop(0, splits, one, (filled((ROWS, self.half), 0), no_keys()))
        self.finish(part, item, values, stats)
        return turn + splits

    def finish(self, part: int, item: Item, values: jax.Array, stats: Stats) -> None:
        """Stores the results of a tile."""
        m, items, sequence = self.memory, self.items, item.sequence
        numbers: tuple[Any, ...] = ()
        if part == 0:
            wrong = items.leads_outside(self.refs.page_table, sequence, self.lengths.keys[sequence])
            stats = of_queries(stats, items.query_of_rows(item), self.lengths.queries[sequence], wrong)
            some = stats.total != 0
            inverse = self.math.reciprocal(jnp.where(some, stats.total, 1.0))
            self.send((inverse, stats.total))
            lse = self.math.scaled(stats.maximum + log2(jnp.where(some, stats.total, 1.0), self.interpret), LN2)
            numbers = ((self.numbers.at[sequence], jnp.where(some, lse, -jnp.inf)),)
        else:
            plgpu.barrier_wait(m.weights_full)
            inverse, sums = reload_rows(m.numbers, self.interpret)
            some = sums != 0
            plgpu.barrier_arrive(m.weights_free)
        values = self.math.fused(values, across(inverse, self.half), 0.0)
        values = jnp.where(across(some, self.half), values, 0.0)
        self.store(part, item, self.out.at[sequence], values.astype(self.out.dtype), numbers)

    def store(self, part: int, item: Item, target: Any, values: jax.Array, numbers: tuple[Any, ...] = ()) -> None:
        """Writes half of the columns of a tile to (R, V), and numbers of rows, given as pairs of memory and numbers."""
        first, rows = item.tile * ROWS, self.items.rows
        place = Place(item.sequence, first, rows - first)
        counts = {min(ROWS, rows), rows % ROWS or ROWS}
        refs, found = (tuple(x[i] for x in numbers) for i in range(2))
        columns = pl.ds(part * self.half, self.half)
        store_rows(target.at[:, columns], refs, place, values, found, counts, self.interpret)

    def split(self, part: int, item: Item, split: Any, position: Any, turn: Any) -> tuple[jax.Array, Stats]:
        """Computes the blocks of a split, at least one, from a pipeline position on.

        Returns:
            Half of the values, and the stats; those of the second part are of no use but for nan.
        """
        m, items = self.memory, self.items
        begin, end = items.of_split(item, split)
        if part == 0:
            pl.when(begin == item.blocks.first)(partial(plgpu.barrier_wait, m.queries_full))
            state = State(filled((ROWS, self.half), 0), no_keys().maximum, no_weights(self.interpret))
            origin = position - begin
            if items.schedule.ahead:

                def ahead(block: Any, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
                    state, scores = carry
                    state = self.start_values(item, origin, turn, block, state, scores)
                    scores = self.start_scores(origin + block + 1)
                    (values,) = finish(1, state.values, interpret=self.interpret)
                    plgpu.barrier_arrive(m.keys_free[0].at[self.slot(origin + block)])
                    scores = self.finish_scores(item, block + 1, scores)
                    plgpu.barrier_arrive(m.scores_done)
                    return state._replace(values=values), scores

                scores = self.finish_scores(item, begin, self.start_scores(position))
                state, scores = lax.fori_loop(begin, end - 1, ahead, (state, scores))
                state = self.start_values(item, origin, turn, end - 1, state, scores)
                plgpu.barrier_arrive(m.scores_done)
                state = self.finish_values(origin + end - 1, state)
            else:

                def step(block: Any, state: State) -> State:
                    scores = self.finish_scores(item, block, self.start_scores(origin + block))
                    return self.finish_values(
                        origin + block, self.start_values(item, origin, turn, block, state, scores)
                    )

                state = lax.fori_loop(begin, end, step, state)
            values, stats = state.values, Stats(state.maximum, total(state.sums, self.interpret))
        else:
            values = filled((ROWS, self.half), 0)
            values, stats = lax.fori_loop(begin, end, partial(self.second_step, position - begin), values), no_keys()
        return self.checked(part, item, (begin, end), turn, values, stats)

    def slot(self, place: Any) -> Any:
        """Returns the stage of a pipeline position."""
        return lax.rem(place, self.items.schedule.stages)

    def start_scores(self, place: Any) -> jax.Array:
        """Starts the products of the queries and the keys at a pipeline position."""
        m, slot = self.memory, self.slot(place)
        # A zero that ptxas does not know: constant operand descriptors would be hoisted out of the loop and spilled.
        queries = m.queries.at[place >> _NEVER]
        left, right, others = (keys.at[slot] for keys in m.keys)
        columns = [queries.at[:, pl.ds(at * self.half, width)] for at, width in enumerate(self.items.widths)]
        plgpu.barrier_wait(m.keys_full[0].at[slot])
        scores = start(None, (columns[0],), (left,), interpret=self.interpret)
        plgpu.barrier_wait(m.keys_full[1].at[slot])
        return start(scores, tuple(columns[1:]), (right, others), interpret=self.interpret)

    def finish_scores(self, item: Item, block: Any, scores: jax.Array) -> jax.Array:
        """Returns scores, -inf where a key is not seen."""
        (scores,) = finish(0, scores, interpret=self.interpret)
        pl.when(block + 1 == item.blocks.last)(partial(plgpu.barrier_arrive, self.memory.queries_free))
        return lax.cond(item.blocks.in_part(block), partial(self.masked, item, block), lambda scores: scores, scores)

    def start_values(self, item: Item, origin: Any, turn: Any, block: Any, state: State, scores: jax.Array) -> State:
        """Makes weights of the scores of a block, sends them, and starts the left half of the values."""
        m, items, math_ = self.memory, self.items, self.math
        left, right = (keys.at[self.slot(origin + block)] for keys in m.keys[:2])
        maximum = jnp.maximum(state.maximum, math_.scaled(scores.max(axis=1), items.factor))
        weights = math_.exp2(math_.fused(scores, items.factor, across(-maximum, items.contract.key_block)))
        decay = math_.exp2(state.maximum - maximum)
        sums = add_weights(state.sums, decay, weights, self.interpret)

        @pl.when(item.blocks.in_part(block))
        def _() -> None:
            seen = item.blocks.end - block * items.contract.key_block
            for half in (left, right):
                marks = m.marks.at[lax.rem(turn, 2), 0]
                zero_fill_values(half, self.half, seen, marks, turn + 1, self.interpret)
            plgpu.commit_smem()

        rounded = weights.astype(m.weights.dtype)
        self.send((decay, decay), rounded)
        values = math_.product(state.values, across(decay, self.half))
        values = start(values, rounded, (left,), right_along=False, interpret=self.interpret)
        return State(values, maximum, sums)

    def finish_values(self, place: Any, state: State) -> State:
        """Waits for the values of the block at a pipeline position."""
        (values,) = finish(0, state.values, interpret=self.interpret)
        plgpu.barrier_arrive(self.memory.keys_free[0].at[self.slot(place)])
        return state._replace(values=values)

    def second_step(self, origin: Any, block: Any, values: jax.Array) -> jax.Array:
        """Takes a block of keys: the right half of the values."""
        m = self.memory
        slot = self.slot(origin + block)
        plgpu.barrier_wait(m.weights_full)
        decay, _ = reload_rows(m.numbers, self.interpret)
        values = self.math.product(values, across(decay, self.half))
        if self.items.schedule.ahead:
            plgpu.barrier_wait(m.scores_done)
        weights = (m.weights.at[(origin + block) >> _NEVER],)
        values = start(values, weights, (m.keys[1].at[slot],), right_along=False, interpret=self.interpret)
        (values,) = finish(0, values, interpret=self.interpret)
        plgpu.barrier_arrive(m.weights_free)
        plgpu.barrier_arrive(m.keys_free[1].at[slot])
        return values

    def send(self, numbers: tuple[jax.Array, jax.Array], weights: jax.Array | None = None) -> None:
        """Sends numbers of rows, and weights, to the second warpgroup."""
        m = self.memory
        plgpu.barrier_wait(m.weights_free)
        if weights is not None:
            share(weights, m.weights.at[0], self.interpret)
        spill_rows(numbers, m.numbers, self.interpret)
        if self.interpret:
            plgpu.commit_smem()  # ordinary writes
        plgpu.barrier_arrive(m.weights_full)

    def masked(self, item: Item, block: Any, scores: jax.Array) -> jax.Array:
        """Returns scores with -inf where a key is not seen."""
        return keep_band(
            scores, None, self.seen(item) - block * self.items.contract.key_block - 1, -math.inf, self.interpret
        )

    def seen(self, item: Item) -> jax.Array:
        """Returns the end of the keys that each row of a tile sees, (64,) int32."""
        positions = self.lengths.offsets[item.sequence] + self.items.query_of_rows(item)
        return self.items.mask_bounds.range(positions, self.items.keys_of(self.lengths, item.sequence))[1]

    def checked(
        self, part: int, item: Item, blocks: tuple[Any, Any], turn: Any, values: jax.Array, stats: Stats
    ) -> tuple[jax.Array, Stats]:
        """Returns values and stats of a split with nan in the rows that see a value that is not finite."""
        m, items = self.memory, self.items
        marks, stamp = m.marks.at[lax.rem(turn, 2)], turn + 1
        mark_not_finite(values, items.rows_left(self.lengths, item), marks.at[part], stamp, self.interpret)
        plgpu.barrier_arrive(m.split_ends)
        plgpu.barrier_wait(m.split_ends)
        some = (marks[0, 0] == stamp) | (marks[1, 0] == stamp)

        def look(values: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
            block, keys = items.contract.key_block, items.keys_of(self.lengths, item.sequence)
            begin, end = blocks[0] * block, jnp.minimum(blocks[1] * block, keys)
            place = first_not_finite(
                self.refs.key, self.refs.page_table, items.value_size, item.sequence, begin, end, self.interpret
            )
            found = place < self.seen(item)
            return (
                jnp.where(across(found, self.half), jnp.float32(math.nan), values),
                jnp.where(found, jnp.float32(math.nan), sums),
            )

        values, sums = lax.cond(some, look, lambda values, sums: (values, sums), values, stats.total)
        return values, stats._replace(total=sums)


def run(call: AttentionCall, items: Items) -> tuple[jax.Array, ...]:
    """Runs the kernel.

    Args:
        call: The call, with queries as rows (B, R, size) and S of a contiguous cache a multiple of 8.
        items: The items.

    Returns:
        The results (B, R, V) and the log-sum-exp (B, R), float32; or, with items of one split, the values
        (B, splits, R', V) of each and their maxima and sums (B, 2, R', splits'), float32. R' is at least R.
    """
    dtype, size = call.query.dtype, items.value_size
    if items.schedule.whole:
        outputs = [
            jax.ShapeDtypeStruct((items.batch, items.rows, size), dtype),
            jax.ShapeDtypeStruct((items.batch, items.rows), jnp.float32),
        ]
        if items.splits > 1:
            outputs.append(jax.ShapeDtypeStruct((items.grid, _PARTS, ROWS * size // _PARTS), jnp.float32))
    else:
        outputs = [
            jax.ShapeDtypeStruct((items.batch, items.splits, items.padded, size), jnp.float32),
            jax.ShapeDtypeStruct((items.batch, 2, items.padded, padded_splits(items.splits)), jnp.float32),
        ]

    def kernel(refs: AttentionCall, out: Any, numbers: Any, *rest: Any) -> None:
        *held, memory = rest
        body = Body(items, refs, out, numbers, held[0] if held else None, memory)
        warpgroup = lax.axis_index("warpgroup")
        for part in range(_PARTS):

            @pl.when(warpgroup == part)
            def _(part: int = part) -> None:
                plgpu.set_max_registers(items.schedule.registers[0], action="increase")
                body.compute(part)

        @pl.when(warpgroup == _PARTS)
        def _() -> None:
            plgpu.set_max_registers(items.schedule.registers[1], action="decrease")
            body.produce()

    return launch(
        "latent_attention",
        kernel,
        outputs,
        {"block": items.grid},
        [Memory.types(items, dtype)],
        warpgroups={"warpgroup": _PARTS + 1},
        parameters=PARAMETERS,
        interpret=items.interpret,
    )(call)
