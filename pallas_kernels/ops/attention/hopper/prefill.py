"""Attention of many queries: two warpgroups with 64 queries of a head each, a producer, persistent blocks.

The splits of `SplitAttentionContract` are merged where they are computed. What the splits before gave waits in shared
memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import SplitAttentionContract
from pallas_kernels.ops.attention.hopper._factors import factors_of, scaled_rows
from pallas_kernels.ops.attention.hopper._keys import KeySource
from pallas_kernels.ops.attention.hopper._online import Stats, of_queries, result
from pallas_kernels.ops.attention.hopper._pairs import Pairs
from pallas_kernels.ops.attention.hopper._ring import Ring
from pallas_kernels.ops.attention.hopper._scores import Scoring
from pallas_kernels.ops.attention.hopper._sight import Blocks, Sight
from pallas_kernels.ops.attention.hopper._walk import Parked, Walk
from pallas_kernels.parts.hopper.tile import ROW, ROWS, Arithmetic, tiled
from pallas_kernels.schedule.hopper.attention import WIDEST_PARKED, PrefillSchedule


@dataclass(frozen=True)
class Call:
    """What is fixed about a call.

    Attributes:
        contract: Order of the sums.
        scoring: From products to scores.
        sight: How far queries see.
        source: Where keys come from.
        batch: Sequences.
        queries: Queries of each, padded to a multiple of 8.
        heads: Query heads.
        group: Query heads to a key head.
        size: Width of a head.
        value_size: The same of the values.
        capacity: Most keys of a sequence.
        unit: Unit of keys and values of 8 bits, as `EightBitContract` says; 1 for others.
        interpret: False, or parameters of Mosaic's interpreter.
    """

    contract: SplitAttentionContract
    scoring: Scoring
    sight: Sight
    source: KeySource
    batch: int
    queries: int
    heads: int
    group: int
    size: int
    value_size: int
    capacity: int
    unit: float
    interpret: Any

    def leads_outside(self, table: Any, sequence: Any, keys: Any) -> jax.Array | None:
        """Returns whether the page table of a sequence leads outside of the cache; None without pages."""
        return None if table is None else self.source.leads_outside(table, sequence, keys, bool(self.interpret))


class Lengths(NamedTuple):
    """Numbers of each sequence: position of the first query, queries, keys.

    They lie in one array, since an array of equal numbers, as those of one kind often are, is filled by a kernel. Where
    the queries are negative, what the caller gave was out of range, and all results of the sequence are nan.

    Attributes:
        numbers: (B, 3) int32, an array or a reference.
    """

    numbers: Any

    @classmethod
    def within(cls, limits: jax.Array, queries: int, keys: int) -> "Lengths":
        """Returns the numbers (B, 3) of sequences, of no more queries and keys than there are."""
        most = np.array([[np.iinfo(np.int32).max, queries, keys]], np.int32)
        return cls(jnp.minimum(jnp.asarray(limits, jnp.int32), most))

    @property
    def offsets(self) -> "_Column":
        """Position of the first query of each sequence."""
        return _Column(self.numbers, 0)

    @property
    def queries(self) -> "_Column":
        """Queries of each sequence."""
        return _Column(self.numbers, 1)

    @property
    def keys(self) -> "_Column":
        """Keys of each sequence."""
        return _Column(self.numbers, 2)


class _Column(NamedTuple):
    """A number of each sequence."""

    numbers: Any
    place: int

    def __getitem__(self, sequence: Any) -> Any:
        return self.numbers[sequence, self.place]


class Further(NamedTuple):
    """Further arrays of a call, references in its kernels; None where there are none.

    Attributes:
        table: (B, n) int32, the pages of each sequence.
        slopes: (B or 1, N) float32, times log2(e).
        sinks: The same.
        key_scale: (B or 1, K, H) float32, the factors of keys of 8 bits, unless the queries hold them already.
        value_scale: (B or 1, K, V) float32, those of values.
        shared: (1,) int32, the splits that all sequences share.
        bias: (B or 1, N or 1, T or 1, keys of whole blocks or 1), floats.
        mask: (B or 1, N or 1, T or 1, words of whole blocks or 1) int32, bits.
    """

    table: Any = None
    slopes: Any = None
    sinks: Any = None
    key_scale: Any = None
    value_scale: Any = None
    shared: Any = None
    bias: Any = None
    mask: Any = None

    @property
    def given(self) -> list[Any]:
        """Those that there are."""
        return [x for x in self if x is not None]

    def refs(self, given: Iterable[Any]) -> "Further":
        """Returns references to those that there are."""
        found = iter(given)
        return Further(*(None if x is None else next(found) for x in self))


class Tile(NamedTuple):
    """What the warpgroups of a block compute with the same keys: a sequence, a set of heads, the first of its units."""

    sequence: Any
    heads: Any
    unit: Any


class Unit(NamedTuple):
    """What one warpgroup computes: 64 queries of a head, from the first one on."""

    sequence: Any
    head: Any
    first: Any


@dataclass(frozen=True)
class Order:
    """The order in which blocks take tiles: to and fro over the blocks, heads in groups, the last queries first.

    A tile has as many units as there are warpgroups. Those of a set of heads, one head or all that share a key head,
    are numbered from the last queries on, and over its heads first, so that those of a tile see about as many keys.
    """

    call: Call
    schedule: PrefillSchedule

    @property
    def together(self) -> int:
        """Query heads of a set."""
        return self.call.group if self.schedule.packed else 1

    @property
    def pieces(self) -> int:
        """Units of a query head; whole tiles of one head, whose last queries then end with a block of keys."""
        multiple = self.schedule.warpgroups if self.together == 1 else 1
        return -(-self.call.queries // (ROWS * multiple)) * multiple

    @property
    def units(self) -> int:
        """Units of a set of heads."""
        return self.pieces * self.together

    @property
    def padded(self) -> int:
        """Queries of a sequence with those of the units behind the end, of which tiles are filled up."""
        return (self.pieces + (1 if self.units % self.schedule.warpgroups else 0)) * ROWS

    @property
    def across(self) -> int:
        """Tiles of a set of heads."""
        return -(-self.units // self.schedule.warpgroups)

    @property
    def sets(self) -> int:
        """Sets of heads of a sequence."""
        return self.call.heads // self.together

    @property
    def tiles(self) -> int:
        """Tiles of all heads."""
        return self.call.batch * self.sets * self.across

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return min(self.schedule.blocks, self.tiles)

    def count(self, block: Any) -> Any:
        """Returns the number of tiles of a block."""
        whole, rest = divmod(self.tiles, self.blocks)
        return whole + jnp.where(self._place(whole, block) < rest, 1, 0)

    def tile(self, block: Any, index: Any) -> Tile:
        """Returns a block's tile."""
        every = self.call.batch * self.sets
        heads: Any = min(-(-self.schedule.heads // self.together) or every, every)
        number = index * self.blocks + self._place(index, block)
        start = lax.div(number, heads * self.across) * heads
        number = lax.rem(number, heads * self.across)
        heads = jnp.minimum(every - start, heads)
        row, head = lax.div(number, heads), start + lax.rem(number, heads)
        return Tile(lax.div(head, self.sets), lax.rem(head, self.sets), row * self.schedule.warpgroups)

    def unit(self, tile: Tile, warpgroup: Any) -> Unit:
        """Returns a warpgroup's part of a tile; one behind the end has no queries that are there."""
        number, together = tile.unit + warpgroup, self.together
        first = jnp.where(number < self.units, self._first(number), self.pieces * ROWS)
        return Unit(tile.sequence, tile.heads * together + lax.rem(number, together), first)

    def key_head(self, tile: Tile) -> Any:
        """Returns the key head of a tile."""
        return lax.div(tile.heads * self.together, self.call.group)

    def queries(self, tile: Tile) -> tuple[Any, Any]:
        """Returns the first and the last query of a tile."""
        end = jnp.minimum(tile.unit + self.schedule.warpgroups, self.units)
        return self._first(end - 1), self._first(tile.unit) + (ROWS - 1)

    def _first(self, unit: Any) -> Any:
        return (self.pieces - 1 - lax.div(unit, self.together)) * ROWS

    def _place(self, index: Any, block: Any) -> Any:
        return jnp.where(lax.rem(index, 2) == 0, block, self.blocks - 1 - block)


class Scratch(NamedTuple):
    """Memory and barriers of all warpgroups.

    Attributes:
        queries: Shared memory.
        parked: Of each warpgroup, values in shared memory or in the block's part of GPU memory; None for one split.
        results: Shared memory: over the parked values if those lie there, over the queries for wide heads.
        queries_full: A barrier for each warpgroup.
    """

    queries: Any
    parked: Parked | None
    results: Any
    queries_full: Any


@dataclass(frozen=True)
class Body:
    """The kernel's program.

    Attributes:
        call: What is fixed about the call.
        schedule: The schedule.
        splits: Whether a query can see keys of more than one split.
    """

    call: Call
    schedule: PrefillSchedule
    splits: bool

    @property
    def wide(self) -> bool:
        """Whether heads are so wide that results go through the queries' memory, and are parked in GPU memory."""
        return self.call.value_size > WIDEST_PARKED

    @property
    def order(self) -> Order:
        """The order of the tiles."""
        return Order(self.call, self.schedule)

    def blocks_of(self, lengths: Lengths, tile: Tile) -> Blocks:
        """Returns the blocks of a tile, the same for all warpgroups."""
        offset, keys = lengths.offsets[tile.sequence], lengths.keys[tile.sequence]
        first, last = self.order.queries(tile)
        blocks = self.call.sight.blocks(offset + first, offset + last, keys, self.call.contract.key_block)
        # Behind the sequence's last query there is nothing to see; one block is walked, with all its scores masked.
        some = first < lengths.queries[tile.sequence]
        return blocks._replace(last=jnp.where(some, blocks.last, blocks.first + 1))

    def produce(self, caches: Any, table: Any, lengths: Lengths, ring: Ring) -> None:
        """Fills the ring with the blocks of all tiles of this block of the grid."""
        block = lax.axis_index("block")

        def fill(index: Any, position: Any) -> Any:
            tile = self.order.tile(block, index)
            blocks = self.blocks_of(lengths, tile)
            ring.fill(blocks, position, caches, table, tile.sequence, self.order.key_head(tile))
            return position + (blocks.last - blocks.first)

        ring.drain(lax.fori_loop(0, self.order.count(block), fill, jnp.int32(0)))

    def compute(
        self, query: Any, lengths: Lengths, further: Further, out: Any, lse: Any, scratch: Scratch, ring: Ring
    ) -> None:
        """Computes this warpgroup's queries of all tiles of this block of the grid."""
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        count, order = self.order.count(block), self.order
        queries, ready = scratch.queries.at[warpgroup], scratch.queries_full.at[warpgroup]

        def fetch(index: Any) -> None:
            unit = order.unit(order.tile(block, index), warpgroup)
            plgpu.copy_gmem_to_smem(query.at[unit.sequence, pl.ds(unit.first, ROWS), unit.head], queries, ready)

        def fetch_next(index: Any) -> None:
            @pl.when(index + 1 < count)
            def _() -> None:
                plgpu.commit_smem()  # every warp has read the queries
                fetch(index + 1)

        def fetch_behind_results(index: Any) -> None:
            @pl.when(index + 1 < count)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                fetch(index + 1)

        def one(index: Any, position: Any) -> Any:
            tile = order.tile(block, index)
            blocks, unit = self.blocks_of(lengths, tile), order.unit(tile, warpgroup)
            keys, offset = lengths.keys[tile.sequence], lengths.offsets[tile.sequence]

            def queries_of_rows() -> jax.Array:
                found: jax.Array = unit.first + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
                return found

            walk = Walk(
                self.call.contract,
                self.call.scoring,
                self.call.sight,
                lambda: offset + queries_of_rows(),
                _of_head(further.slopes, unit),
                keys,
                blocks,
                queries,
                ring,
                position,
                None if scratch.parked is None else Parked(*(x.at[warpgroup] for x in scratch.parked)),
                (lambda: None) if self.wide else partial(fetch_next, index),
                bool(self.call.interpret),
                pairs=Pairs.of(
                    *(further.bias, further.mask, tile.sequence),
                    *(lambda: unit.head, queries_of_rows, bool(self.call.interpret)),
                ),
            )
            plgpu.barrier_wait(ready)
            values, stats = walk.run()
            wrong = self.call.leads_outside(further.table, unit.sequence, keys)
            stats = of_queries(stats, queries_of_rows(), lengths.queries[unit.sequence], wrong)
            sink = _of_head(further.sinks, unit)
            self.store(unit, sink, further.value_scale, out, lse, scratch.results.at[warpgroup], values, stats)
            if self.wide:
                fetch_behind_results(index)
            return position + (blocks.last - blocks.first)

        fetch(jnp.int32(0))
        lax.fori_loop(0, count, one, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def store(
        self,
        unit: Unit,
        sink: jax.Array | None,
        factors: Any,
        out: Any,
        lse: Any,
        staged: Any,
        values: jax.Array,
        stats: Stats,
    ) -> None:
        """Writes the results of a warpgroup's queries."""
        values, log_sum = result(values, stats, sink, Arithmetic(interpret=bool(self.call.interpret)))
        lse.at[unit.sequence, unit.head, pl.ds(unit.first, ROWS)][...] = log_sum
        if self.wide:
            plgpu.commit_smem()  # every warp has read the queries that lie there
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if factors is None:
            staged[...] = values.astype(staged.dtype)
        else:
            of_head = factors_of(factors, unit.sequence, lax.div(unit.head, self.call.group))
            interpret = bool(self.call.interpret)
            staged[...] = scaled_rows(values, of_head, self.call.unit, staged.dtype, interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[unit.sequence, pl.ds(unit.first, ROWS), unit.head])


def _of_head(numbers: Any, unit: Unit) -> jax.Array | None:
    """Returns a unit's number of (B or 1, N) for each of its queries, (64,)."""
    if numbers is None:
        return None
    sequence = unit.sequence if numbers.shape[0] > 1 else 0
    found: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), numbers[sequence, unit.head], jnp.float32), ROW)
    return found


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: Lengths,
    further: Further,
    *,
    call: Call,
    schedule: PrefillSchedule,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        query: (B, T, N, H), T a multiple of 8.
        key: (B, S, K, H), S a multiple of 8, or (P, page, K, H) with a table.
        value: (B, S, K, V) or (P, page, K, V), of the dtype of `key`.
        lengths: Numbers of each sequence.
        further: Further arrays.
        call: What is fixed about the call.
        schedule: Warpgroups, stages and order.

    Returns:
        The outputs (B, T, N, V), and the log-sum-exp (B, N, T'), float32, T' being T rounded up to whole
        units and in some cases one more.
    """
    s, dtype = schedule, query.dtype
    body = Body(call, s, call.capacity > call.contract.split)
    interpret = bool(call.interpret)

    def kernel(*refs: Any) -> None:
        query_ref, key_ref, value_ref, *refs = refs  # type: ignore[assignment]
        lengths, refs = Lengths(refs[0]), refs[1:]
        more, refs = further.refs(refs), refs[len(further.given) :]
        (out_ref, lse_ref, *parked_ref), refs = refs[: len(outputs)], refs[len(outputs) :]
        queries, queries_full, *stages = refs
        stages, places = stages[: len(in_ring)], stages[len(in_ring) :]
        parked = None
        if body.splits:
            *places, rows = places
            if body.wide:
                values = parked_ref[0].at[lax.axis_index("block")]
            else:
                values, *places = places if interpret else places[0]
            parked = Parked(values, rows)
        results = queries if body.wide else places[0].at[:, 0]
        scratch = Scratch(queries, parked, results, queries_full)
        ring = Ring(s.stages, call.source, interpret, *stages)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < s.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(s.registers[0], action="increase")
            body.compute(query_ref, lengths, more, out_ref, lse_ref, scratch, ring)

        @pl.when(warpgroup == s.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(s.registers[1], action="decrease")
            body.produce((key_ref, value_ref), more.table, lengths, ring)

    parks, places = body.splits and not body.wide, (s.warpgroups, ROWS * call.value_size)
    # The parked values take twice the bytes of the results that lie over them.
    halves = 2 if parks and not interpret else 1
    width = call.value_size
    results = plgpu.SMEM((s.warpgroups, halves, ROWS, width), dtype, transforms=tiled(dtype, width))
    union = [] if body.wide else [results]
    if parks:
        union = [plgpu.SMEM(places, jnp.float32), results]
        union = union if interpret else [plgpu.RefUnion(*union)]
    outputs = [
        jax.ShapeDtypeStruct((*query.shape[:3], width), dtype),
        jax.ShapeDtypeStruct((call.batch, call.heads, body.order.padded), jnp.float32),
    ]
    if body.wide and body.splits:
        outputs.append(jax.ShapeDtypeStruct((body.order.blocks, *places), jnp.float32))
    in_ring = Ring.scratch(s.stages, call.source, call.size, width, dtype, s.warpgroups)
    launch = plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(body.order.blocks,),
        grid_names=("block",),
        kernel_name="attention_prefill",
        num_threads=s.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((s.warpgroups, ROWS, call.size), dtype, transforms=tiled(dtype, call.size)),
            plgpu.Barrier(num_barriers=s.warpgroups),
            *in_ring,
            *union,
            *([plgpu.SMEM((s.warpgroups, 2, ROWS), jnp.float32)] if body.splits else []),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=call.interpret,
    )
    out, lse, *_ = launch(query, key, value, lengths.numbers, *further.given)
    return out, lse
