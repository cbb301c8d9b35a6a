"""Attention of a few queries: the heads that share a key head packed into a tile of 64 rows.

A row takes the steps of the kernel for many queries. An item is a tile with all of its keys, as there; or with one
split of them, so that a few sequences keep all blocks busy, and `merge` does with the splits what that kernel does in
one block. Items are bound by memory: a warpgroup computes, another copies, blocks walk the items. With `schedule.swap`
a tile has at most 8 rows, which are wgmma's columns. `_decode_launch` has the launches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.call import OF_HEADS, AttentionCall
from pallas_kernels.ops.attention.hopper import _decode_launch
from pallas_kernels.ops.attention.hopper._byte_ring import ByteRing
from pallas_kernels.ops.attention.hopper._byte_walk import ByteWalk, LeftRing
from pallas_kernels.ops.attention.hopper._decode_results import Results, store_columns, store_rows
from pallas_kernels.ops.attention.hopper._factors import factors_of, scale_rows, scaled_rows
from pallas_kernels.ops.attention.hopper._items import Item, Items
from pallas_kernels.ops.attention.hopper._online import Stats, of_queries, result
from pallas_kernels.ops.attention.hopper._ring import Ring, drain
from pallas_kernels.ops.attention.hopper._score_operands import ScoreOperands, TileRows
from pallas_kernels.ops.attention.hopper._scratch import Scratch
from pallas_kernels.ops.attention.hopper._setup import Lengths, Setup
from pallas_kernels.ops.attention.hopper._swap import check_swap
from pallas_kernels.ops.attention.hopper._swapped_walk import SwappedWalk
from pallas_kernels.ops.attention.hopper._walk import Walk
from pallas_kernels.ops.attention.hopper.merge import merge, padded_splits
from pallas_kernels.parts.hopper.bytes_left import turn_queries
from pallas_kernels.parts.hopper.columns import COLUMN, COLUMNS
from pallas_kernels.parts.hopper.products import WIDEST
from pallas_kernels.parts.hopper.tile import ROW, ROWS, Arithmetic

_WIDEST_OF_FOUR: Final = 128  # columns of an instruction; where there are four warpgroups, ptxas takes no wider ones


@dataclass(frozen=True)
class Body(Items):
    """The kernel's program."""

    def produce(
        self,
        walker: Any,
        refs: AttentionCall,
        scratch: Any,
        fill: Callable[[Item, Any], None],
        ring: Ring | ByteRing | LeftRing,
    ) -> None:
        """Fetches the rows and the blocks of all items of a walker.

        Args:
            walker: Its number in its block of the grid.
            refs: The arrays of the call, with the rows that `packed` returns as queries.
            scratch: Where the rows go.
            fill: Fills a ring with the blocks of an item from a position on.
            ring: The ring.
        """
        first, walker = 2 * walker, self.number(walker)
        lengths = Lengths(refs.limits)

        def fetch(index: Any, carry: Any) -> Any:
            position, done = carry
            item = self.item(lengths, walker, index)
            some = item.blocks.last > item.blocks.first

            @pl.when(some)
            def _() -> None:
                slot = first + lax.rem(done, 2)
                pl.when(done >= 2)(partial(plgpu.barrier_wait, scratch.queries_free.at[slot]))
                self.copy_rows(refs.query, item, scratch.queries.at[slot], scratch.queries_full.at[slot])

            fill(item, position)
            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0), done + jnp.where(some, 1, 0)

        position, done = lax.fori_loop(0, self.count(walker), fetch, (jnp.int32(0), jnp.int32(0)))
        ring.drain(position)
        drain((scratch.queries_free,), 2, done, lambda index: first + lax.rem(index, 2))

    def widen(self, values: bool, refs: AttentionCall, stored: ByteRing, ring: Ring) -> None:
        """Makes keys, or values, of the bytes of all items of this block of the grid.

        Args:
            values: Whether values.
            refs: The arrays of the call.
            stored: The bytes.
            ring: Where keys and values go.
        """
        walker, lengths = self.number(0), Lengths(refs.limits)
        make, free = (stored.widen_values, ring.values_free) if values else (stored.widen_keys, ring.keys_free)

        def one(index: Any, position: Any) -> Any:
            item = self.item(lengths, walker, index)
            make(item.blocks, position, ring)
            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0)

        filled = lax.fori_loop(0, self.count(walker), one, jnp.int32(0))
        drain((free,), ring.stages, filled, lambda position: lax.rem(position, ring.stages))

    def compute(
        self, walker: Any, refs: AttentionCall, results: Results, scratch: Scratch, ring: Ring | LeftRing
    ) -> None:
        """Computes all items of a walker, given by its number in its block of the grid."""
        first, walker = 2 * walker, self.number(walker)
        lengths = Lengths(refs.limits)

        def one(index: Any, carry: Any) -> Any:
            position, done = carry
            item = self.item(lengths, walker, index)
            some = item.blocks.last > item.blocks.first

            @pl.when(some)
            def _() -> None:
                self.one_item(_Tile(self.setup, refs, item, first + lax.rem(done, 2), position), results, scratch, ring)

            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0), done + jnp.where(some, 1, 0)

        lax.fori_loop(0, self.count(walker), one, (jnp.int32(0), jnp.int32(0)))

    def one_item(self, tile: "_Tile", results: Results, scratch: Scratch, ring: Any) -> None:
        """Walks the keys of a tile of rows and stores what they give."""
        place = self.place(tile.item)
        target = results.of(place, tile.item.split, self.schedule.whole)
        queries = scratch.queries.at[tile.slot]
        plgpu.barrier_wait(scratch.queries_full.at[tile.slot])

        def after_scores() -> None:
            plgpu.barrier_arrive(scratch.queries_free.at[tile.slot])

        if scratch.shared is not None:
            columns, stats = tile.walk_as_columns(queries, ring, scratch.shared, after_scores)
            of_bytes = isinstance(ring, LeftRing)
            store_columns(target.values, target.numbers, place, columns, stats, self.rows, tile.interpret, of_bytes)
            return
        values, stats = tile.walk(queries, ring, scratch.parked, after_scores)
        numbers: tuple[jax.Array, ...] = stats
        if self.schedule.whole:
            values, lse = tile.results(values, stats, results.values.dtype)
            numbers = (lse,)
        store_rows(target.values, target.numbers, place, values, numbers, self.counts, tile.interpret)


@dataclass(frozen=True)
class _Tile:
    """The rows of an item, inside of the kernel.

    Attributes:
        setup: What is fixed about the launch.
        refs: The arrays of the call.
        item: The item.
        slot: Where its queries lie.
        position: Position in the ring of its first block.
    """

    setup: Setup
    refs: AttentionCall
    item: Item
    slot: Any
    position: Any

    @property
    def interpret(self) -> bool:
        """Whether Mosaic's interpreter runs the kernel."""
        return bool(self.setup.interpret)

    @property
    def lengths(self) -> Lengths:
        """Numbers of each sequence."""
        return Lengths(self.refs.limits)

    @property
    def keys(self) -> Any:
        """Keys of the sequence."""
        return self.lengths.keys[self.item.sequence]

    def query(self, row: jax.Array) -> jax.Array:
        """Returns the query to which a row of the tile belongs."""
        found: jax.Array = lax.div(self.item.tile * ROWS + row, jnp.full_like(row, self.setup.group))
        return found

    def queries_of_rows(self) -> jax.Array:
        """Returns the query of each row, (64,) int32."""
        return self.query(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW))

    def heads_of_rows(self) -> jax.Array:
        """Returns the query head of each row, (64,) int32."""
        row = self.item.tile * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        found: jax.Array = self.item.head * self.setup.group + lax.rem(row, jnp.full_like(row, self.setup.group))
        return found

    def positions(self, count: int, layout: Any) -> jax.Array:
        """Returns the positions of the queries of the first rows, (count,) int32."""
        rows = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
        found: jax.Array = self.lengths.offsets[self.item.sequence] + self.query(rows)
        return found

    def of_rows(self, numbers: Any) -> jax.Array | None:
        """Returns numbers (B or 1, heads, rows) of each row, (64,), or None."""
        if numbers is None:
            return None
        item = self.item
        sequence, rows = item.sequence if numbers.shape[0] > 1 else 0, pl.ds(item.tile * ROWS, ROWS)
        found: jax.Array = plgpu.load(numbers.at[sequence, item.head, rows], layout=ROW, optimized=False)
        return found

    def factors(self, of_all: Any) -> Any:
        """Returns the factors of the key head's columns, in GPU memory."""
        return factors_of(of_all, self.item.sequence, self.item.head)

    def walk_as_columns(
        self, queries: Any, ring: Any, shared: Any, after_scores: Callable[[], None]
    ) -> tuple[tuple[jax.Array, ...], Stats]:
        """Walks the keys with the rows as wgmma's columns."""
        form: Callable[..., SwappedWalk] = SwappedWalk
        if isinstance(ring, LeftRing):
            turn_queries(queries, self.factors(self.refs.key_scale), self.setup.unit, self.interpret)
            form = ByteWalk
        return form(
            factor=self.setup.scoring.factor,
            sight=self.setup.sight,
            positions=lambda: self.positions(COLUMNS, COLUMN),
            length=self.keys,
            blocks=self.item.blocks,
            queries=queries,
            ring=ring,
            position=self.position,
            shared=shared,
            after_scores=after_scores,
            interpret=self.interpret,
        ).run()

    def walk(self, queries: Any, ring: Ring, parked: Any, after_scores: Callable[[], None]) -> tuple[jax.Array, Stats]:
        """Walks the keys with the rows as wgmma's rows."""
        refs, setup = self.refs, self.setup
        if refs.key_scale is not None:
            scale_rows(queries, self.factors(refs.key_scale), setup.unit, self.interpret)
        rows = TileRows(self.item.sequence, self.heads_of_rows, self.queries_of_rows, self.of_rows, self.interpret)
        return Walk(
            contract=setup.contract,
            scoring=setup.scoring,
            sight=setup.sight,
            positions=lambda: self.positions(ROWS, ROW),
            operands=ScoreOperands.of(refs, rows),
            length=self.keys,
            blocks=self.item.blocks,
            queries=queries,
            ring=ring,
            position=self.position,
            parked=parked,
            after_scores=after_scores,
            interpret=self.interpret,
            widest=WIDEST if refs.key_scale is None else _WIDEST_OF_FOUR,
        ).run()

    def results(self, values: jax.Array, stats: Stats, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs of the rows and their log-sum-exp, of values and stats of all keys."""
        refs, sequence = self.refs, self.item.sequence
        queries = self.queries_of_rows()
        wrong = self.setup.leads_outside(refs.page_table, sequence, self.keys)
        stats = of_queries(stats, queries, self.lengths.queries[sequence], wrong)
        values, lse = result(values, stats, self.of_rows(refs.sinks), Arithmetic(interpret=self.interpret))
        if refs.value_scale is None:
            return values.astype(dtype), lse
        return scaled_rows(values, self.factors(refs.value_scale), self.setup.unit, dtype, self.interpret), lse


def decode(call: AttentionCall, body: Body) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel and, unless its items have all keys, the merge of its splits.

    Args:
        call: The call as `_score_operands.prepared` returns it, S of a contiguous cache a multiple of 8. Its
            `common_prefix` is the number of splits that are shared, for a `Cascade`, and None for others.
        body: The kernel's program.

    Returns:
        The outputs (B, T, N, V), and the log-sum-exp (B, T, N), float32.

    Raises:
        UnsupportedError: If the schedule does not fit the call.
    """
    s, setup, dtype = body.schedule, body.setup, call.query.dtype
    check_swap(body, call)
    fp8 = call.key.dtype == jnp.float8_e4m3fn
    if fp8:
        key, value = (lax.bitcast_convert_type(x, jnp.int8) for x in (call.key, call.value))
        call = replace(call, key=key, value=value)
    sinks = call.sinks
    call = call if s.whole else replace(call, sinks=None)
    of_heads: dict[str, Any] = {name: body.of_tiles(getattr(call, name)) for name in OF_HEADS}
    call = replace(call, **of_heads)
    sequences, padded = body.room
    if s.whole:
        outputs = [
            jax.ShapeDtypeStruct((sequences, padded, setup.value_size), dtype),
            jax.ShapeDtypeStruct((sequences, padded), jnp.float32),
        ]
    else:
        outputs = [
            jax.ShapeDtypeStruct((sequences, body.splits, padded, setup.value_size), jnp.float32),
            jax.ShapeDtypeStruct((sequences, 2, padded, padded_splits(body.splits)), jnp.float32),
        ]
    run = _decode_launch.run_bytes if s.swap and call.key.dtype == jnp.int8 else _decode_launch.run
    packed: Any = body.packed(call.query)
    out, lse = run(replace(call, query=packed), body=body, fp8=fp8, outputs=outputs)
    if not s.whole:
        if sinks is not None:
            of_rows = body.of_rows(sinks, body.rows)
            sinks = jnp.pad(of_rows, ((0, 0), (0, body.merged[1] - of_rows.shape[1])))
        out, lse = merge(
            out,
            lse,
            replace(call, sinks=sinks),
            setup=setup,
            rows=body.rows,
            dtype=dtype,
            splits_of=body.splits_seen,
            room=body.merged,
            place_of=body.of_result,
        )
    return body.unpacked(out), body.unpacked(lse)
