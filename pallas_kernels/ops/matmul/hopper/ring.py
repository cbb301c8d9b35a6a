"""The kernel of the Hopper matmul: one producer warpgroup, one or more computing ones, a ring of stages between them.

The producer copies tiles of both operands into shared memory (TMA), the computing warpgroups multiply them (wgmma)
into float32 accumulators and write the result. Every accumulator is one chain over K upwards in steps of 16, whatever
the schedule: tiles and stages decide who computes an element and when, never in which order it is summed.
What happens to a finished accumulator is `hopper.epilogue`.

wgmma multiplies rows by columns. With `schedule.swap` the weights are the rows and the activations the columns, so
that a small batch fills 8 columns instead of 64 rows; without it the activations are the rows.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import add_as_tree
from pallas_kernels.ops.matmul.hopper.epilogue import Ending, Epilogue, Store, add_tiles, make_store
from pallas_kernels.parts.hopper.groups import GroupWalk, Table
from pallas_kernels.parts.hopper.operand import SWIZZLE_BYTES, Operand, in_stack, loaded_rows, tile_transforms
from pallas_kernels.parts.hopper.pipeline import (
    COMPUTE_REGISTERS,
    PRODUCER_REGISTERS,
    TURN_REGISTERS,
    Place,
    Ring,
    Walk,
    here,
    launch,
)
from pallas_kernels.parts.hopper.turn_bytes import turn_bytes
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.tiles import SMS, MatmulSchedule


@dataclass(frozen=True)
class Shards:
    """K cut into chains of their own (`pallas_kernels.contract.SplitWgmmaContract`).

    Attributes:
        count: Number of shards, at least 2.
        length: Elements of K in one, a multiple of the schedule's `k_step`.
        across: Whether a block sums one shard and leaves the tree to others, or all of them and their tree.
    """

    count: int
    length: int
    across: bool


@in_32_bits
def ring_matmul(
    x: jax.Array,
    w: jax.Array,
    epilogue: Epilogue,
    *,
    total: jax.Array | None = None,
    sizes: jax.Array | None = None,
    schedule: MatmulSchedule,
    transpose_w: bool,
    transpose_x: bool = False,
    out_dtype: Any,
    interpret: Any,
    shards: Shards | None = None,
    folded: bool = False,
) -> jax.Array:
    """Runs the kernel on operands that the copy engine can address.

    Args:
        x: (M, K), or a stack (B, M, K); K a multiple of 8 (of 16 for int8), M and B at least 1. (K, M) with
            `transpose_x`, where M is a multiple of 16. A matrix beside a stack of `w` belongs to every entry.
        w: (K, N), or (N, K) with `transpose_w`, of the same 2-byte dtype; N a multiple of 8, and of 16 where the
            weights are (K, N). A stack too, or with `transpose_x` a matrix that belongs to every entry. Of int8,
            whose sums are exact, weights (K, N) with N a multiple of 32 are turned in shared memory.
        epilogue: What is done to the sums before they are rounded; scales for int8.
        total: (M', N') or a stack of them, float32, with which the sums start; M' and N' are multiples of what a
            block computes and at least M and N. Without it they start at zero. Not for a schedule with `swap`.
        sizes: (B,) int32, how many rows of a matrix `x` belong to each entry of `w`, one entry behind the other. Rows
            behind them become zeros; where sizes are negative or add up to more than M, all become nan. A schedule
            without `swap` has whole swizzled rows of the result in a tile.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        transpose_x: Whether `x` is stored as (K, M).
        out_dtype: Dtype of the result; rounded from the float32 accumulator once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        shards: The cut of K, for matrices; by default there is one chain.
        folded: Whether every step is a chain of its own, and their sums are added upwards in float32.

    Returns:
        (M, N) or (B, M, N) of `out_dtype`; with shards across blocks (count, M, N), the shards' own sums.
    """
    stack, n, s = max(x.shape[:-2], w.shape[:-2]), w.shape[-2 if transpose_w else -1], schedule
    if sizes is not None:
        stack = ()
    m, k = x.shape[:-3:-1] if transpose_x else x.shape[-2:]
    across, length, chains = False, k, 1
    if shards is not None:
        across, length = shards.across, shards.length
        stack, chains = ((shards.count,), 1) if across else ((), shards.count)
    if folded:
        length, chains = s.k_step, -(-k // s.k_step)
    x_side, w_side = _operands(m, k, n, x.dtype, epilogue, s, transpose_x, transpose_w)
    turned = None
    if x.dtype == jnp.int8 and not transpose_w:
        turned = w_side
        x_side = replace(x_side, swizzle=SWIZZLE_BYTES)
        w_side = Operand(w_side.tile * w_side.tiles, s.k_step, True, w_side.tile, w_side.tile, SWIZZLE_BYTES, s.k_step)
    walk: Walk | GroupWalk
    if sizes is not None:
        x_side = replace(x_side, anywhere=True)
        walk = group_walk(sizes.shape[0], m, n, s)
    rows, columns = (w_side, x_side) if s.swap else (x_side, w_side)
    if sizes is None:
        walk = Walk(stack, rows.tiles, columns.tiles, rows.tile, columns.tile, s.group, s.blocks)
    chain_steps = -(-length // s.k_step)
    shape = (s.tile_rows // rows.sources, s.tile_columns // columns.sources)  # of an accumulator
    call = _Call(
        epilogue,
        make_store(s, shape, m, n, jnp.dtype(out_dtype), epilogue, sizes is not None),
        s,
        rows,
        columns,
        turned,
        walk,
        Ring.of(walk, chains * chain_steps, s.stages),
        shape,
        chains,
        chain_steps,
        length if across else None,
        total is not None,
        jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
        folded,
        interpret,
    )
    run = launch(
        call.name,
        call.kernel,
        ((*stack, m, n), out_dtype),
        call.scratch(x.dtype, out_dtype),
        blocks=walk.blocks,
        warpgroups=s.warpgroups + call.turners + 1,
        interpret=interpret,
    )
    return run(x, w, *(a for a in (total, sizes) if a is not None), *epilogue.inputs)


def group_walk(groups: int, m: int, n: int, s: MatmulSchedule) -> GroupWalk:
    """Returns how the tiles of (M, N) are walked whose rows belong to so many groups."""
    table = Table(groups, m, s.block_m)
    blocks = max(1, min(s.blocks or SMS, -(-n // s.block_n) * (table.most_tiles + 1)))
    return GroupWalk(table, n, s.block_n, s.swap, s.group, blocks)


def _operands(
    m: int, k: int, n: int, dtype: Any, epilogue: Epilogue, s: MatmulSchedule, transpose_x: bool, transpose_w: bool
) -> tuple[Operand, Operand]:
    """Returns the activations and the weights as they pass through shared memory."""
    sources = 2 if epilogue.gated else 1
    swizzle, w_tile = SWIZZLE_BYTES // dtype.itemsize, s.block_n // sources
    if not transpose_w:
        swizzle = math.gcd(swizzle, n, w_tile)
    if transpose_x:
        swizzle = math.gcd(swizzle, m, s.block_m)
    loaded = s.block_m if transpose_x else loaded_rows(m, s.block_m)
    return (
        Operand(m, k, not transpose_x, s.block_m, loaded, swizzle, s.k_step),
        Operand(n, k, transpose_w, w_tile, w_tile, swizzle, s.k_step, sources),
    )


@dataclass(frozen=True)
class _Call:
    """What is fixed about a launch.

    Attributes:
        epilogue: What is done to the sums.
        store: How a tile leaves.
        schedule: Tiles and stages.
        rows: wgmma's rows.
        columns: wgmma's columns.
        turned: The weights as they are copied, where a warpgroup turns them before they are read; else None.
        walk: How blocks walk the tiles.
        ring: The stages.
        shape: Rows and columns of an accumulator.
        chains: Chains over K in a tile, which are added as a tree, or upwards.
        chain_steps: Steps of one chain.
        shard: Elements of K in the shard that an entry of the stack stands for; None where the stack is one of results.
        continued: Whether the sums start with what is given.
        sums: Dtype of the sums.
        folded: Whether the chains are added upwards.
        interpret: Whether the interpreter runs the kernel.
    """

    epilogue: Epilogue
    store: Store
    schedule: MatmulSchedule
    rows: Operand
    columns: Operand
    turned: Operand | None
    walk: Walk | GroupWalk
    ring: Ring
    shape: tuple[int, int]
    chains: int
    chain_steps: int
    shard: int | None
    continued: bool
    sums: Any
    folded: bool
    interpret: Any

    @property
    def name(self) -> str:
        """What profiles call the kernel."""
        kind = "quant_matmul" if self.sums == jnp.int32 else "gated_matmul" if self.epilogue.gated else "matmul"
        return f"group_{kind}" if isinstance(self.walk, GroupWalk) else kind

    @property
    def alias(self) -> list[bool]:
        """Which of rows, columns and store need their shared memory as plain rows too."""
        return [not self.interpret and one.ragged for one in (self.rows, self.columns, self.store)]

    @property
    def copied(self) -> tuple[Operand, Operand]:
        """Rows and columns as they are copied."""
        if self.turned is None:
            return self.rows, self.columns
        return (self.turned, self.columns) if self.schedule.swap else (self.rows, self.turned)

    @property
    def turners(self) -> int:
        """Warpgroups that turn the weights."""
        return 0 if self.turned is None else 1

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread that copies, that turns, that computes; 0 to leave them as they are."""
        if self.turners:
            return TURN_REGISTERS[self.schedule.warpgroups]
        several = self.schedule.warpgroups > 1
        return (PRODUCER_REGISTERS, 0, COMPUTE_REGISTERS[self.schedule.warpgroups]) if several else (0, 0, 0)

    @property
    def takers(self) -> int:
        """Warpgroups that take tiles in turn."""
        return self.schedule.warpgroups if self.schedule.split == "tiles" else 1

    @property
    def pieces(self) -> int:
        """Products of a step, for each source."""
        return max(self.rows.pieces, self.columns.pieces)

    @property
    def sources(self) -> int:
        """Accumulators of a tile."""
        return max(self.rows.sources, self.columns.sources)

    def scratch(self, dtype: Any, out_dtype: Any) -> list[Any]:
        """Returns the shared memory and the barriers of a block."""
        s, ring, (rows_alias, columns_alias, store_alias) = self.schedule, self.ring, self.alias
        stages = [
            self.rows.scratch(ring.stages, dtype, rows_alias),
            self.columns.scratch(ring.stages, dtype, columns_alias),
        ]
        apart = []
        if self.turned is not None:
            weights, tiles = 0 if s.swap else 1, self.turned.scratch(ring.stages, dtype, False)
            if self.interpret:  # which knows no two views of the same bytes
                apart = [tiles]
            else:
                stages[weights] = plgpu.RefUnion(stages[weights], tiles)
        rows_side, columns_side = self.copied
        return [
            *stages,
            self.store.scratch(s.warpgroups, out_dtype, store_alias),
            plgpu.Barrier(
                num_arrivals=rows_side.arrivals + columns_side.arrivals, num_barriers=ring.stages * self.takers
            ),
            plgpu.Barrier(num_arrivals=s.warpgroups // self.takers, num_barriers=ring.stages),
            *([] if self.epilogue.residual is None else [self.store.barrier(s.warpgroups, store_alias)]),
            *(apart if self.turned is None else [*apart, plgpu.Barrier(num_barriers=ring.stages)]),
            *([self.walk.table.scratch(), plgpu.Barrier()] if isinstance(self.walk, GroupWalk) else []),
        ]

    def kernel(self, x: Any, w: Any, *refs: Any) -> None:
        """The body of a block."""
        total, refs = (refs[0], refs[1:]) if self.continued else (None, refs)
        in_groups = isinstance(self.walk, GroupWalk)
        sizes, refs = (refs[0], refs[1:]) if in_groups else (None, refs)
        scales, refs = (None, refs) if self.epilogue.scales is None else (refs[:2], refs[2:])
        up, bias, residual, (out, *scratch) = self.epilogue.take(refs)
        rows, columns, buffers = (
            ref if aliased else (ref, None) for ref, aliased in zip(scratch, self.alias, strict=False)
        )
        full, empty, *others = scratch[3:]
        fetched = None if residual is None else others.pop(0)
        tiles, turned = None, None
        if self.turned is not None:
            weights_side = 0 if self.schedule.swap else 1
            if self.interpret:
                tiles = others.pop(0)
            else:
                sides = [rows, columns]
                (read, tiles), _ = sides[weights_side]
                sides[weights_side] = read, None
                rows, columns = sides
            turned = others.pop(0)
        weights = [w] if up is None else [w, up]
        warpgroup, block = here()
        walk: Any = self.walk
        if isinstance(self.walk, GroupWalk):
            groups, (table, ready) = self.walk.table, others
            walk = self.walk.of(table)

            @pl.when(warpgroup == 0)
            def _() -> None:
                groups.fill(sizes, table, self.interpret)
                plgpu.barrier_arrive(ready)

            plgpu.barrier_wait(ready)
        body = _Body(
            call=self,
            row_sources=weights if self.schedule.swap else [x],
            column_sources=[x] if self.schedule.swap else weights,
            rows=rows,
            columns=columns,
            buffers=buffers,
            out=out,
            total=total,
            bias=bias,
            residual=residual,
            scales=scales,
            full=full,
            empty=empty,
            fetched=fetched,
            tiles=tiles,
            turned=turned,
            walk=walk,
            warpgroup=warpgroup,
            block=block,
            count=walk.count(block),
        )
        computing = self.schedule.warpgroups
        pl.when(warpgroup == computing + self.turners)(body.produce)
        if self.turners:
            pl.when(warpgroup == computing)(body.turn)
        pl.when(warpgroup < computing)(body.consume)


@dataclass(frozen=True)
class _Body:
    """A block: what is fixed, and its references.

    Attributes:
        call: What is fixed.
        row_sources: wgmma's rows in memory.
        column_sources: wgmma's columns in memory.
        rows: Their stages in shared memory, and the same as plain rows or None.
        columns: The same of the columns.
        buffers: The same of the store.
        out: The result.
        total: The sums to continue, or None.
        bias: The bias, or None.
        residual: The residual, or None.
        scales: The scales of rows and columns, or None.
        full: Barriers of the stages that have arrived.
        empty: Barriers of the stages that have been read.
        fetched: Barriers of the residual, or None.
        tiles: Stages of weights before they are turned, or None.
        turned: Barriers of the stages whose weights have been turned, or None.
        walk: Where the tiles of the block stand.
        warpgroup: This warpgroup.
        block: This block.
        count: Tiles of this block.
    """

    call: _Call
    row_sources: list[Any]
    column_sources: list[Any]
    rows: tuple[Any, Any]
    columns: tuple[Any, Any]
    buffers: tuple[Any, Any]
    out: Any
    total: Any
    bias: Any
    residual: Any
    scales: Any
    full: Any
    empty: Any
    fetched: Any
    tiles: Any
    turned: Any
    walk: Any
    warpgroup: Any
    block: Any
    count: Any

    def arrival(self, tile: Any, slot: Any) -> Any:
        """The barrier of a stage: one for each taker, because a barrier must see all who wait wait each time."""
        takers = self.call.takers
        return slot if takers == 1 else lax.rem(tile, takers) * self.call.ring.stages + slot

    def produce(self) -> None:
        """Copies both operands of all tiles of the block."""
        call, s = self.call, self.call.schedule
        if call.registers[0]:
            plgpu.set_max_registers(call.registers[0], action="decrease")
        rows, columns = ((tiled if plain is None else plain) for tiled, plain in (self.rows, self.columns))
        if self.tiles is not None:
            rows, columns = (self.tiles, columns) if s.swap else (rows, self.tiles)

        def begin(tile: Any) -> tuple[Place, Any]:
            place = self.walk.place(self.block, tile)
            return place, 0 if call.shard is None else place.entry * call.shard

        def copy(begun: tuple[Place, Any], tile: Any, step: Any, slot: Any) -> None:
            place, start = begun
            for operand, sources, target, first in (
                (call.copied[0], self.row_sources, rows, place.row),
                (call.copied[1], self.column_sources, columns, place.column),
            ):
                k, full = start + step * s.k_step, self.full.at[self.arrival(tile, slot)]
                entries = [in_stack(source, place.entry) for source in sources]
                operand.copy(entries, target, first, k, slot, full)

        call.ring.produce(self.count, self.empty, begin, copy)

    def turn(self) -> None:
        """Turns the weights of every stage in place."""
        call, s = self.call, self.call.schedule
        tiled = (self.rows if s.swap else self.columns)[0]
        plgpu.set_max_registers(call.registers[1], action="decrease")
        copied, read = call.copied[0 if s.swap else 1], call.rows if s.swap else call.columns

        @pl.loop(0, self.count * call.ring.steps)
        def _(position: Any) -> None:
            slot = lax.rem(position, call.ring.stages)
            plgpu.barrier_wait(self.full.at[slot])
            source, target = self.tiles.at[slot, 0], tiled.at[slot, 0]
            if call.interpret:
                target[...] = source[...].T
            else:
                transforms = tile_transforms(copied.swizzle, jnp.int8), tile_transforms(read.swizzle, jnp.int8)
                turn_bytes(source, target, s.k_step, copied.tile, copied.swizzle, transforms)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.turned.at[slot])

    def consume(self) -> None:
        """Multiplies and stores this warpgroup's part of the tiles of the block."""
        call, s, takers = self.call, self.call.schedule, self.call.takers
        if call.registers[2]:
            plgpu.set_max_registers(call.registers[2], action="increase")
        row_offset = self.warpgroup * call.shape[0] if s.split == "rows" else 0
        tiled, plain = self.buffers
        ending = Ending(
            call.epilogue,
            call.store,
            s.swap,
            self.out,
            tiled.at[self.warpgroup],
            None if plain is None else plain.at[self.warpgroup],
            self.bias,
            self.residual,
            self.scales,
            None if self.fetched is None else self.fetched.at[self.warpgroup],
            call.interpret,
        )
        part = pl.ds(row_offset, call.shape[0]) if call.rows.tile > call.shape[0] else slice(None)

        @pl.loop(0, self.count if takers == 1 else lax.div(self.count - self.warpgroup + takers - 1, takers))
        def _(turn: Any) -> None:
            tile = turn if takers == 1 else turn * takers + self.warpgroup
            _, entry, row, column, valid = self.walk.place(self.block, tile)
            row = row + row_offset
            ending.begin(entry, row, column, call.shape)
            one = functools.partial(self.chain, tile=tile, entry=entry, row=row, column=column, part=part)
            if call.folded:
                sums = lax.fori_loop(1, call.chains, lambda i, total: add_tiles(total, one(i)), one(0))
            else:
                sums = add_as_tree(one, call.chains, add_tiles)
            ending.finish(sums, entry, row, column, self.valid(valid, row_offset))

        if isinstance(call.walk, GroupWalk):
            self.fill_rest(ending, row_offset)
        plgpu.wait_smem_to_gmem(0)

    def valid(self, valid: Any, row_offset: Any) -> Any:
        """Returns how many of the rows of a tile that are stored belong to this warpgroup and the ones behind it."""
        return valid if valid is None or self.call.schedule.swap else valid - row_offset

    def fill_rest(self, ending: Ending, row_offset: Any) -> None:
        """Stores zeros for rows without a group, or nan if the sizes of the groups do not fit."""
        call, takers = self.call, self.call.takers

        @pl.loop(self.count, self.walk.turns(self.block))
        def _(turn: Any) -> None:
            @pl.when(lax.rem(turn, takers) == (self.warpgroup if takers > 1 else 0))
            def _() -> None:
                row, column = self.walk.rest(self.block, turn)
                number = jnp.where(self.walk.fit, jnp.float32(0), jnp.float32(jnp.nan))
                tile = plgpu.layout_cast(jnp.broadcast_to(number, call.shape), plgpu.Layout.WGMMA)
                ending.fill(tile, row + row_offset, column)

    def chain(self, index: Any, tile: Any, entry: Any, row: Any, column: Any, part: Any) -> Any:
        """Sums the steps of one chain."""
        call = self.call
        first, last = index * call.chain_steps, (index + 1) * call.chain_steps

        def previous() -> Any:
            """Returns this warpgroup's part of the sums to continue."""
            at = pl.ds(row, call.shape[0]), pl.ds(column, call.shape[1])
            return plgpu.load(in_stack(self.total, entry).at[at], layout=plgpu.Layout.WGMMA, optimized=False)

        def accumulate(*accumulators: Any) -> Any:
            if self.total is not None and not call.interpret:
                accumulators[0][...] = previous()
            self.multiply(accumulators, tile, first, part)

            def further(step: Any) -> None:
                self.multiply(accumulators, tile, step, part)
                # The products of the step before are done, this one's go on.
                plgpu.wgmma_wait(call.pieces * call.sources)
                self.release(tile, step - 1)

            if call.chain_steps > 1:
                pl.loop(first + 1, last)(further)

            plgpu.wgmma_wait(0)
            self.release(tile, last - 1)
            results = tuple(accumulator[...] for accumulator in accumulators)
            if self.total is not None and call.interpret:
                # The interpreter cannot store to an accumulator: another order.
                return (results[0] + previous(),)
            return results

        return pl.run_scoped(accumulate, *[plgpu.WGMMAAccumulatorRef(call.shape, call.sums)] * call.sources)

    def multiply(self, accumulators: Any, tile: Any, step: Any, part: Any) -> None:
        """Waits for a stage and starts its products; `part` of the rows is this warpgroup's."""
        call = self.call
        slot = call.ring.slot(tile, step)
        plgpu.barrier_wait(self.full.at[self.arrival(tile, slot)])
        if self.turned is not None:
            plgpu.barrier_wait(self.turned.at[slot])
        for piece in range(call.pieces):
            for source, accumulator in enumerate(accumulators):
                left = call.rows.read(self.rows[0], slot, source, piece, call.pieces, part)
                right = call.columns.read(self.columns[0], slot, source, piece, call.pieces, slice(None))
                plgpu.wgmma(accumulator, left, right.transpose((1, 0)))

    def release(self, tile: Any, step: Any) -> None:
        """Gives a stage back."""
        plgpu.barrier_arrive(self.empty.at[self.call.ring.slot(tile, step)])
