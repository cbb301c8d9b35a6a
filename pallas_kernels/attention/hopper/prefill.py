"""Attention of many queries: two warpgroups with 64 queries of a head each, a producer, persistent blocks.

The splits of `SplitAttentionContract` are merged where they are computed. Partial results of earlier splits are kept in
shared memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._factors import factors_of, scaled_rows
from pallas_kernels.attention.hopper._key_loop import KeyLoop, Spilled
from pallas_kernels.attention.hopper._mask_bounds import Blocks
from pallas_kernels.attention.hopper._online import of_queries, result
from pallas_kernels.attention.hopper._order import Order, Tile, Unit
from pallas_kernels.attention.hopper._ring import Ring, Stages
from pallas_kernels.attention.hopper._score_operands import ScoreOperands, TileRows
from pallas_kernels.attention.hopper._setup import FAST, Lengths, Setup
from pallas_kernels.attention.schedule.hopper import WIDEST_SPILLED, PrefillSchedule
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.tile import ROW, ROWS, Arithmetic, tiled


class Scratch(NamedTuple):
    """Memory and barriers of all warpgroups.

    Attributes:
        queries: Shared memory.
        spilled: Spilled values per warpgroup, in shared memory or the block's part of GPU memory; None for one split.
        results: Shared memory, aliasing the spilled values if they are there, the queries for wide heads.
        queries_full: A barrier for each warpgroup.
    """

    queries: Any
    spilled: Spilled | None
    results: Any
    queries_full: Any


@dataclass(frozen=True)
class Body:
    """The kernel's program.

    Attributes:
        setup: The static parameters of the launch.
        schedule: The schedule.
        splits: Whether a query can see keys of more than one split.
    """

    setup: Setup
    schedule: PrefillSchedule
    splits: bool

    @property
    def wide(self) -> bool:
        """Whether wide heads require storing through the queries' memory and spilling to GPU memory."""
        return self.setup.value_size > WIDEST_SPILLED

    @property
    def math(self) -> Arithmetic:
        """The instructions on tiles of 64 rows."""
        return Arithmetic(interpret=bool(self.setup.interpret))

    @property
    def order(self) -> Order:
        """The order of the tiles."""
        return Order(self.setup, self.schedule)

    def blocks_of(self, lengths: Lengths, tile: Tile) -> Blocks:
        """Returns the blocks of a tile, the same for all warpgroups."""
        offset, keys = lengths.offsets[tile.sequence], lengths.keys[tile.sequence]
        first, last = self.order.queries(tile)
        blocks = self.setup.mask_bounds.blocks(offset + first, offset + last, keys, self.setup.contract.key_block)
        # After the sequence's last query nothing is seen; one fully masked block is processed.
        some = first < lengths.queries[tile.sequence]
        return blocks._replace(last=jnp.where(some, blocks.last, blocks.first + 1))

    def produce(self, caches: Any, table: Any, lengths: Lengths, ring: Ring) -> None:
        """Fills the pipeline with the blocks of all tiles of this block of the grid."""
        block = lax.axis_index("block")

        def fill(index: Any, position: Any) -> Any:
            tile = self.order.tile(block, index)
            blocks = self.blocks_of(lengths, tile)
            ring.fill(blocks, position, caches, table, tile.sequence, self.order.key_head(tile))
            return position + (blocks.last - blocks.first)

        ring.drain(lax.fori_loop(0, self.order.count(block), fill, jnp.int32(0)))

    def compute(self, refs: AttentionCall, out: Any, lse: Any, scratch: Scratch, ring: Ring) -> None:
        """Computes this warpgroup's queries of all tiles of this block of the grid."""
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        count, order = self.order.count(block), self.order
        query: Any = refs.query
        lengths = Lengths(refs.limits)
        queries, ready = scratch.queries.at[warpgroup], scratch.queries_full.at[warpgroup]

        def fetch(index: Any) -> None:
            unit = order.unit(order.tile(block, index), warpgroup)
            plgpu.copy_gmem_to_smem(query.at[unit.sequence, pl.ds(unit.first, ROWS), unit.head], queries, ready)

        def fetch_next(index: Any) -> None:
            @pl.when(index + 1 < count)
            def _() -> None:
                plgpu.commit_smem()  # every warp has read the queries
                fetch(index + 1)

        def fetch_after_results(index: Any) -> None:
            @pl.when(index + 1 < count)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                fetch(index + 1)

        def one(index: Any, position: Any) -> Any:
            tile = order.tile(block, index)
            blocks, unit = self.blocks_of(lengths, tile), order.unit(tile, warpgroup)
            keys, offset = lengths.keys[tile.sequence], lengths.offsets[tile.sequence]

            def queries_of_rows() -> jax.Array:
                return unit.first + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)

            def of_head(numbers: Any) -> jax.Array | None:
                return _of_head(numbers, unit)

            rows = TileRows(tile.sequence, lambda: unit.head, queries_of_rows, of_head, bool(self.setup.interpret))
            key_loop = KeyLoop(
                contract=self.setup.contract,
                scoring=self.setup.scoring,
                mask_bounds=self.setup.mask_bounds,
                positions=lambda: offset + queries_of_rows(),
                operands=ScoreOperands.of(refs, rows),
                length=keys,
                blocks=blocks,
                queries=queries,
                ring=ring,
                position=position,
                spilled=None if scratch.spilled is None else Spilled(*(x.at[warpgroup] for x in scratch.spilled)),
                after_scores=(lambda: None) if self.wide else partial(fetch_next, index),
                interpret=bool(self.setup.interpret),
            )
            plgpu.barrier_wait(ready)
            values, stats = key_loop.run()
            wrong = self.setup.leads_outside(refs.page_table, unit.sequence, keys)
            stats = of_queries(stats, queries_of_rows(), lengths.queries[unit.sequence], wrong)
            values, log_sum = result(values, stats, of_head(refs.sinks), self.math)
            lse.at[unit.sequence, unit.head, pl.ds(unit.first, ROWS)][...] = log_sum
            self.store(unit, refs.value_scale, out, scratch.results.at[warpgroup], values)
            if self.wide:
                fetch_after_results(index)
            return position + (blocks.last - blocks.first)

        fetch(jnp.int32(0))
        lax.fori_loop(0, count, one, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def store(self, unit: Unit, factors: Any, out: Any, staged: Any, values: jax.Array) -> None:
        """Writes the outputs of a warpgroup's queries, through shared memory `staged`."""
        if self.wide:
            plgpu.commit_smem()  # every warp has read the queries there
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if factors is None:
            staged[...] = values.astype(staged.dtype)
        else:
            of_head = factors_of(factors, unit.sequence, lax.div(unit.head, self.setup.group))
            interpret = bool(self.setup.interpret)
            staged[...] = scaled_rows(values, of_head, self.setup.unit, staged.dtype, interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[unit.sequence, pl.ds(unit.first, ROWS), unit.head])


def _of_head(numbers: Any, unit: Unit) -> jax.Array | None:
    """Returns a unit's number of (B or 1, N) for each of its queries, (64,)."""
    if numbers is None:
        return None
    sequence = unit.sequence if numbers.shape[0] > 1 else 0
    return plgpu.layout_cast(jnp.full((ROWS,), numbers[sequence, unit.head], jnp.float32), ROW)


def prefill(call: AttentionCall, *, setup: Setup, schedule: PrefillSchedule) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        call: The call as `_score_operands.prepared` returns it: T a multiple of 8, and S of a contiguous cache too.
        setup: The static parameters of the launch.
        schedule: Warpgroups, stages and order.

    Returns:
        The outputs (B, T, N, V), and the log-sum-exp (B, N, T'), float32, T' being T rounded up to whole units, in some
        cases plus one.
    """
    s, dtype, width = schedule, call.query.dtype, setup.value_size
    body = Body(setup, s, setup.capacity > setup.contract.split)
    outputs = [
        jax.ShapeDtypeStruct((*call.query.shape[:3], width), dtype),
        jax.ShapeDtypeStruct((setup.batch, setup.heads, body.order.padded), jnp.float32),
    ]
    if body.wide and body.splits:
        outputs.append(jax.ShapeDtypeStruct((body.order.blocks, s.warpgroups, ROWS * width), jnp.float32))

    def kernel(given: AttentionCall, out: Any, lse: Any, *refs: Any) -> None:
        *spilled, memory = refs
        scratch = memory.scratch(body, spilled)
        ring = Ring.of(s.stages, setup.source, setup.interpret, memory.ring)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < s.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(s.registers[0], action="increase")
            body.compute(given, out, lse, scratch, ring)

        @pl.when(warpgroup == s.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(s.registers[1], action="decrease")
            body.produce((given.key, given.value), given.page_table, Lengths(given.limits), ring)

    out, lse, *_ = launch(
        "attention_prefill",
        kernel,
        outputs,
        {"block": body.order.blocks},
        [_Memory.types(body, dtype)],
        warpgroups={"warpgroup": s.warpgroups + 1},
        parameters=FAST,
        interpret=setup.interpret,
    )(call)
    return out, lse


class _Memory(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
        queries: Of each warpgroup.
        queries_full: A barrier for each.
        ring: Stages of keys and values.
        spilled: Values of each warpgroup that are spilled, under the interpreter.
        results: Results of each warpgroup, None where they lie over the queries; elsewhere than under the interpreter
            a pair, of what is spilled and of what lies over it.
        rows: Numbers of each warpgroup that are spilled.
    """

    queries: Any
    queries_full: Any
    ring: Stages
    spilled: Any
    results: Any
    rows: Any

    @classmethod
    def types(cls, body: Body, dtype: Any) -> "_Memory":
        """Returns the types."""
        setup, s = body.setup, body.schedule
        warpgroups, width, interpret = s.warpgroups, setup.value_size, bool(setup.interpret)
        spills = body.splits and not body.wide
        # The spilled values take twice the bytes of the results that lie over them.
        halves = 2 if spills and not interpret else 1
        spilled = plgpu.SMEM((warpgroups, ROWS * width), jnp.float32)
        results = plgpu.SMEM((warpgroups, halves, ROWS, width), dtype, transforms=tiled(dtype, width))
        if spills and not interpret:
            results = plgpu.RefUnion(spilled, results)
        return cls(
            queries=plgpu.SMEM((warpgroups, ROWS, setup.size), dtype, transforms=tiled(dtype, setup.size)),
            queries_full=plgpu.Barrier(num_barriers=warpgroups),
            ring=Stages.types(s.stages, setup.source, setup.size, width, dtype, warpgroups),
            spilled=spilled if spills and interpret else None,
            results=None if body.wide else results,
            rows=plgpu.SMEM((warpgroups, 2, ROWS), jnp.float32) if body.splits else None,
        )

    def scratch(self, body: Body, spilled_values: Sequence[Any]) -> Scratch:
        """Returns the memory of all warpgroups; `spilled_values` are those in GPU memory, if they lie there."""
        values, results, spilled = self.spilled, self.results, None
        if body.splits:
            if body.wide:
                values = spilled_values[0].at[lax.axis_index("block")]
            elif values is None:
                values, results = results
            spilled = Spilled(values, self.rows)
        return Scratch(self.queries, spilled, self.queries if body.wide else results.at[:, 0], self.queries_full)
