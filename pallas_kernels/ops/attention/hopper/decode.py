"""Attention of a few queries: the heads that share a key head packed into a tile of 64 rows.

A row takes the steps of the kernel for many queries. An item is a tile with all of its keys, as there; or with one
split of them, so that a few sequences keep all blocks busy, and `merge` does with the splits what that kernel does in
one block. Items are bound by memory: a warpgroup computes, another copies, blocks walk the items. With `schedule.swap`
a tile has at most 8 rows, which are wgmma's columns. `_decode_launch` has the launches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.hopper import _decode_launch
from pallas_kernels.ops.attention.hopper._byte_ring import ByteRing
from pallas_kernels.ops.attention.hopper._byte_walk import ByteWalk, LeftRing
from pallas_kernels.ops.attention.hopper._decode_results import Place, Results, store_columns, store_rows
from pallas_kernels.ops.attention.hopper._factors import factors_of, scale_rows, scaled_rows
from pallas_kernels.ops.attention.hopper._online import of_queries, result
from pallas_kernels.ops.attention.hopper._pairs import Pairs
from pallas_kernels.ops.attention.hopper._ring import Ring, drain
from pallas_kernels.ops.attention.hopper._scratch import Scratch
from pallas_kernels.ops.attention.hopper._sight import Blocks
from pallas_kernels.ops.attention.hopper._swap import check_swap
from pallas_kernels.ops.attention.hopper._swapped_walk import SwappedWalk
from pallas_kernels.ops.attention.hopper._walk import Walk
from pallas_kernels.ops.attention.hopper.merge import MERGED_ROWS, merge, padded_splits
from pallas_kernels.ops.attention.hopper.prefill import Call, Further, Lengths
from pallas_kernels.parts.hopper.bytes_left import turn_queries
from pallas_kernels.parts.hopper.columns import COLUMN, COLUMNS
from pallas_kernels.parts.hopper.products import WIDEST
from pallas_kernels.parts.hopper.tile import ROW, ROWS, Arithmetic
from pallas_kernels.schedule.hopper.attention import DecodeSchedule

_ROWS: Final = 8  # the copy engine reads tiles of so many rows
_WIDEST_OF_FOUR: Final = 128  # columns of an instruction; where there are four warpgroups, ptxas takes no wider ones


class Item(NamedTuple):
    """One tile of rows, with one split or all of its keys.

    Attributes:
        sequence: Index of the sequence.
        head: Index of the key head.
        tile: Index of the tile among those of the key head.
        split: Index of the split, 0 with all keys.
        blocks: The blocks that the tile's queries see of the split, none if the last is not above the first; of all
            keys, at least one.
    """

    sequence: Any
    head: Any
    tile: Any
    split: Any
    blocks: Blocks


@dataclass(frozen=True)
class Body:
    """The kernel's program."""

    call: Call
    schedule: DecodeSchedule

    def inside(self, further: Further) -> "Body":
        """Returns the program with what it reads from memory first."""
        return self

    @property
    def rows(self) -> int:
        """Rows of a key head."""
        return self.call.queries * self.call.group

    @property
    def room(self) -> tuple[int, int]:
        """Sequences, and rows of each, that arrays of what items give have room for."""
        rows = self.heads * self.rows
        return self.call.batch, rows if self.schedule.whole else -(-rows // MERGED_ROWS) * MERGED_ROWS

    @property
    def merged(self) -> tuple[int, int]:
        """The same for the arrays of results."""
        return self.room

    @property
    def counts(self) -> set[int]:
        """How many rows of a tile may be written."""
        return {min(ROWS, self.rows), self.rows % ROWS or ROWS}

    def place(self, item: Item) -> Place:
        """Returns where the rows of an item lie in what items give."""
        first = item.tile * ROWS
        return Place(item.sequence, item.head * self.rows + first, self.rows - first)

    def of_result(self, sequence: Any, row: Any) -> tuple[Any, Any]:
        """Returns the sequence and the row of what items give for a row of the result."""
        return sequence, row

    def packed(self, query: jax.Array) -> tuple[jax.Array, ...]:
        """Returns queries (B, T, N, H) as the rows of key heads, (B * K, T * group, H)."""
        call = self.call
        shape = (call.batch, call.queries, self.heads, call.group, call.size)
        packed = jnp.moveaxis(query.reshape(shape), 1, 2).reshape(call.batch * self.heads, -1, call.size)
        rows = packed.shape[1]
        return (jnp.pad(packed, ((0, 0), (0, -rows % _ROWS), (0, 0))) if rows > _ROWS else packed,)

    def copy_rows(self, packed: tuple[Any, ...], item: Item, target: Any, barrier: Any) -> None:
        """Starts the copy of the rows of an item from packed queries into shared memory (64 or 8, H)."""
        window = packed[0].at[item.sequence * self.heads + item.head, pl.ds(item.tile * ROWS, self.loaded)]
        plgpu.copy_gmem_to_smem(window, target.at[pl.ds(0, self.loaded)], barrier)

    @property
    def tiles(self) -> int:
        """Tiles of a key head."""
        return -(-self.rows // ROWS)

    @property
    def heads(self) -> int:
        """Key heads."""
        return self.call.heads // self.call.group

    @property
    def splits(self) -> int:
        """Splits of a cache."""
        return -(-self.call.capacity // self.call.contract.split)

    @property
    def items(self) -> int:
        """Items of all blocks."""
        return self.call.batch * (1 if self.schedule.whole else self.splits) * self.tiles * self.heads

    @property
    def parks(self) -> bool:
        """Whether an item has more than one split."""
        return self.schedule.whole and self.splits > 1

    @property
    def grid(self) -> int:
        """Blocks of the grid."""
        return min(self.schedule.blocks, self.items)

    @property
    def walkers(self) -> int:
        """Walkers of all blocks of the grid."""
        return self.grid * self.schedule.walkers

    def number(self, walker: Any) -> Any:
        """Returns the number, among all walkers, of one of this block of the grid: a few items go to many blocks."""
        return lax.axis_index("block") + walker * self.grid

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in shared memory."""
        return COLUMNS if self.schedule.swap else ROWS

    @property
    def loaded(self) -> int:
        """Rows of a tile that are copied; the others are never read by what is stored."""
        return min(ROWS, -(-self.rows // _ROWS) * _ROWS)

    def count(self, walker: Any) -> Any:
        """Returns the number of items of a walker."""
        return lax.div(self.items - 1 - walker + self.walkers, self.walkers)

    def item(self, lengths: Lengths, walker: Any, index: Any) -> Item:
        """Returns an item of a walker: neighbours share a split, so that a cache is read in the order of its bytes."""
        number = index * self.walkers + walker
        head, number = lax.rem(number, self.heads), lax.div(number, self.heads)
        tile, number = lax.rem(number, self.tiles), lax.div(number, self.tiles)
        splits = 1 if self.schedule.whole else self.splits
        split, sequence = lax.rem(number, splits), lax.div(number, splits)
        return Item(sequence, head, tile, split, self.blocks(lengths, sequence, tile, split))

    def blocks(self, lengths: Lengths, sequence: Any, tile: Any, split: Any) -> Blocks:
        """Returns the blocks of an item."""
        seen = self.seen(lengths.offsets[sequence], lengths.keys[sequence])
        there = lengths.queries[sequence] * self.call.group > tile * ROWS
        if self.schedule.whole:
            # One block of a tile without queries is walked, for the zeros that are its result.
            return seen._replace(last=jnp.where(there, seen.last, seen.first + 1))
        length = self.call.contract.split // self.call.contract.key_block
        start, end = jnp.maximum(split * length, seen.first), jnp.minimum((split + 1) * length, seen.last)
        end = jnp.where(there, end, start)
        return seen._replace(first=start, last=end)

    def seen(self, offset: Any, keys: Any) -> Blocks:
        """Returns the blocks that the queries of a sequence see, the same for all of its tiles."""
        return self.call.sight.blocks(offset, offset + (self.call.queries - 1), keys, self.call.contract.key_block)

    def splits_seen(self, offset: Any, queries: Any, keys: Any) -> tuple[Any, Any]:
        """Returns the first and the end of the splits of a sequence that are computed."""
        seen, length = self.seen(offset, keys), self.call.contract.split // self.call.contract.key_block
        begin, end = lax.div(seen.first, length), lax.div(seen.last + (length - 1), length)
        return begin, jnp.where(queries > 0, jnp.minimum(end, self.splits), begin)

    def produce(
        self,
        walker: Any,
        packed: tuple[Any, ...],
        lengths: Lengths,
        scratch: Any,
        fill: Callable[[Item, Any], None],
        ring: Ring | ByteRing | LeftRing,
    ) -> None:
        """Fetches the rows and the blocks of all items of a walker.

        Args:
            walker: Its number in its block of the grid.
            packed: From `packed`.
            lengths: Numbers of each sequence.
            scratch: Where the rows go.
            fill: Fills a ring with the blocks of an item from a position on.
            ring: The ring.
        """
        first, walker = 2 * walker, self.number(walker)

        def fetch(index: Any, carry: Any) -> Any:
            position, done = carry
            item = self.item(lengths, walker, index)
            some = item.blocks.last > item.blocks.first

            @pl.when(some)
            def _() -> None:
                slot = first + lax.rem(done, 2)
                pl.when(done >= 2)(partial(plgpu.barrier_wait, scratch.queries_free.at[slot]))
                self.copy_rows(packed, item, scratch.queries.at[slot], scratch.queries_full.at[slot])

            fill(item, position)
            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0), done + jnp.where(some, 1, 0)

        position, done = lax.fori_loop(0, self.count(walker), fetch, (jnp.int32(0), jnp.int32(0)))
        ring.drain(position)
        drain((scratch.queries_free,), 2, done, lambda index: first + lax.rem(index, 2))

    def widen(self, values: bool, lengths: Lengths, stored: ByteRing, ring: Ring) -> None:
        """Makes keys, or values, of the bytes of all items of this block of the grid.

        Args:
            values: Whether values.
            lengths: Numbers of each sequence.
            stored: The bytes.
            ring: Where keys and values go.
        """
        walker = self.number(0)
        make, free = (stored.widen_values, ring.values_free) if values else (stored.widen_keys, ring.keys_free)

        def one(index: Any, position: Any) -> Any:
            item = self.item(lengths, walker, index)
            make(item.blocks, position, ring)
            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0)

        filled = lax.fori_loop(0, self.count(walker), one, jnp.int32(0))
        drain((free,), ring.stages, filled, lambda position: lax.rem(position, ring.stages))

    def compute(
        self, walker: Any, lengths: Lengths, further: Further, results: Results, scratch: Scratch, ring: Ring | LeftRing
    ) -> None:
        """Computes all items of a walker, given by its number in its block of the grid."""
        first, walker = 2 * walker, self.number(walker)

        def one(index: Any, carry: Any) -> Any:
            position, done = carry
            item = self.item(lengths, walker, index)
            some = item.blocks.last > item.blocks.first

            @pl.when(some)
            def _() -> None:
                self.one_item(item, position, first + lax.rem(done, 2), lengths, further, results, scratch, ring)

            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0), done + jnp.where(some, 1, 0)

        lax.fori_loop(0, self.count(walker), one, (jnp.int32(0), jnp.int32(0)))

    def one_item(
        self,
        item: Item,
        position: Any,
        slot: Any,
        lengths: Lengths,
        further: Further,
        results: Results,
        scratch: Scratch,
        ring: Any,
    ) -> None:
        """Walks the keys of a tile of rows and stores what they give."""
        interpret, call = bool(self.call.interpret), self.call

        def query(row: jax.Array) -> jax.Array:
            """Returns the query to which a row of the tile belongs."""
            found: jax.Array = lax.div(item.tile * ROWS + row, jnp.full_like(row, call.group))
            return found

        def positions(count: int, layout: Any) -> jax.Array:
            rows = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
            found: jax.Array = lengths.offsets[item.sequence] + query(rows)
            return found

        def heads_of_rows() -> jax.Array:
            row = item.tile * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
            found: jax.Array = item.head * call.group + lax.rem(row, jnp.full_like(row, call.group))
            return found

        def queries_of_rows() -> jax.Array:
            return query(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW))

        def of_rows(numbers: Any) -> jax.Array | None:
            if numbers is None:
                return None
            sequence, rows = item.sequence if numbers.shape[0] > 1 else 0, pl.ds(item.tile * ROWS, ROWS)
            found: jax.Array = plgpu.load(numbers.at[sequence, item.head, rows], layout=ROW, optimized=False)
            return found

        def of_item(factors: Any) -> Any:
            return factors_of(factors, item.sequence, item.head)

        def after_scores() -> None:
            plgpu.barrier_arrive(scratch.queries_free.at[slot])

        place = self.place(item)
        target = results.of(place, item.split, self.schedule.whole)
        plgpu.barrier_wait(scratch.queries_full.at[slot])
        if scratch.shared is not None:
            form: Callable[..., SwappedWalk] = SwappedWalk
            if isinstance(ring, LeftRing):
                turn_queries(scratch.queries.at[slot], of_item(further.key_scale), call.unit, interpret)
                form = ByteWalk
            columns = form(
                call.scoring.factor,
                call.sight,
                lambda: positions(COLUMNS, COLUMN),
                lengths.keys[item.sequence],
                item.blocks,
                scratch.queries.at[slot],
                ring,
                position,
                scratch.shared,
                after_scores,
                interpret,
            )
            tiles, stats = columns.run()
            of_bytes = isinstance(ring, LeftRing)
            store_columns(target.values, target.numbers, place, tiles, stats, self.rows, interpret, of_bytes)
            return
        if further.key_scale is not None:
            scale_rows(scratch.queries.at[slot], of_item(further.key_scale), call.unit, interpret)
        walk = Walk(
            call.contract,
            call.scoring,
            call.sight,
            lambda: positions(ROWS, ROW),
            of_rows(further.slopes),
            lengths.keys[item.sequence],
            item.blocks,
            scratch.queries.at[slot],
            ring,
            position,
            scratch.parked,
            after_scores,
            interpret,
            WIDEST if further.key_scale is None else _WIDEST_OF_FOUR,
            Pairs.of(further.bias, further.mask, item.sequence, heads_of_rows, queries_of_rows, interpret),
        )
        values, stats = walk.run()
        numbers: tuple[jax.Array, ...] = stats
        if self.schedule.whole:
            queries = query(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW))
            wrong = call.leads_outside(further.table, item.sequence, lengths.keys[item.sequence])
            stats = of_queries(stats, queries, lengths.queries[item.sequence], wrong)
            values, lse = result(values, stats, of_rows(further.sinks), Arithmetic(interpret=interpret))
            dtype, numbers = results.values.dtype, (lse,)
            if further.value_scale is None:
                values = values.astype(dtype)
            else:
                values = scaled_rows(values, of_item(further.value_scale), call.unit, dtype, interpret)
        store_rows(target.values, target.numbers, place, values, numbers, self.counts, interpret)


def _of_rows(numbers: jax.Array, body: Body, rows: int, padded: int | None = None) -> jax.Array:
    """Returns numbers of heads (B or 1, N) for rows of key heads, (B or 1, R): `rows` of each, then zeros."""
    sequences, call = numbers.shape[0], body.call
    found = jnp.broadcast_to(
        numbers.reshape(sequences, body.heads, 1, call.group), (sequences, body.heads, call.queries, call.group)
    ).reshape(sequences, body.heads, -1)
    found = jnp.pad(found, ((0, 0), (0, 0), (0, rows - found.shape[2]))).reshape(sequences, -1)
    return found if padded is None else jnp.pad(found, ((0, 0), (0, padded - found.shape[1])))


def decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: Lengths,
    further: Further,
    *,
    body: Body,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel and, unless its items have all keys, the merge of its splits.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H), S a multiple of 8, or (P, page, K, H) with a table.
        value: (B, S, K, V) or (P, page, K, V), of the dtype of `key`.
        lengths: Numbers of each sequence.
        further: Further arrays.
        body: The kernel's program.

    Returns:
        The outputs (B, T, N, V), and the log-sum-exp (B, T, N), float32.

    Raises:
        UnsupportedError: If the schedule does not fit the call.
    """
    s, call, dtype = body.schedule, body.call, query.dtype
    check_swap(body, further, key.dtype)
    fp8 = key.dtype == jnp.float8_e4m3fn
    if fp8:
        key, value = (lax.bitcast_convert_type(x, jnp.int8) for x in (key, value))
    sequences, padded = body.room

    def of_tiles(numbers: jax.Array | None) -> jax.Array | None:
        """Returns numbers of heads for the rows of tiles, (B or 1, heads, rows)."""
        if numbers is None:
            return None
        return _of_rows(numbers, body, body.tiles * ROWS).reshape(-1, body.heads, body.tiles * ROWS)

    sinks = further.sinks
    further = further._replace(slopes=of_tiles(further.slopes), sinks=of_tiles(sinks) if s.whole else None)

    if s.whole:
        outputs = [
            jax.ShapeDtypeStruct((sequences, padded, call.value_size), dtype),
            jax.ShapeDtypeStruct((sequences, padded), jnp.float32),
        ]
    else:
        outputs = [
            jax.ShapeDtypeStruct((sequences, body.splits, padded, call.value_size), jnp.float32),
            jax.ShapeDtypeStruct((sequences, 2, padded, padded_splits(body.splits)), jnp.float32),
        ]
    run = _decode_launch.run_bytes if s.swap and key.dtype == jnp.int8 else _decode_launch.run
    out, lse = run(body.packed(query), key, value, lengths, further, body=body, fp8=fp8, outputs=outputs)
    if not s.whole:
        out, lse = merge(
            out,
            lse,
            lengths,
            further._replace(sinks=None if sinks is None else _of_rows(sinks, body, body.rows, body.merged[1])),
            body.splits_seen,
            call=call,
            rows=body.rows,
            dtype=dtype,
            room=body.merged,
            place_of=body.of_result,
        )

    def unpacked(x: jax.Array) -> jax.Array:
        x = x[:, : body.heads * body.rows].reshape(call.batch, body.heads, body.rows, *x.shape[2:])
        x = x[:, :, : call.queries * call.group]
        x = x.reshape(call.batch, body.heads, call.queries, call.group, *x.shape[3:])
        return jnp.moveaxis(x, 1, 2).reshape(call.batch, call.queries, call.heads, *x.shape[4:])

    return unpacked(out), unpacked(lse)
