"""The kernel of the Hopper matmul: a producer warpgroup and computing warpgroups, with a circular buffer of stages.

The producer copies tiles of both operands into shared memory (TMA), the computing warpgroups multiply them (wgmma)
into float32 accumulators and write the result. Every accumulator is one chain over K in ascending steps of 16 for every
schedule: tiles and stages decide where and when an element is computed, never its summation order. Finished
accumulators go through `hopper.epilogue`.

wgmma multiplies rows by columns. With `schedule.swap` the weights are the rows and the activations the columns, so
that a small batch fills 8 columns instead of 64 rows; without it the activations are the rows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.hopper.epilogue import Ending, Epilogue, Store, add_tiles, make_store
from pallas_kernels.matmul.hopper.group_tiles import GroupTileScheduler, Table, TableTileScheduler
from pallas_kernels.matmul.hopper.leaf_tree import LeafTree
from pallas_kernels.matmul.hopper.operand import SWIZZLE_BYTES, Operand, in_stack, loaded_rows, tile_transforms
from pallas_kernels.matmul.hopper.pipeline import Place, Ring, Roles, TileScheduler, here, sum_steps
from pallas_kernels.matmul.hopper.product import Product, Scratch, fill_table
from pallas_kernels.matmul.hopper.transpose_bytes import transpose_bytes
from pallas_kernels.matmul.schedule.hopper.fused_matmul import residual_steps
from pallas_kernels.matmul.schedule.hopper.leaf_levels import shared_bytes, waiting_bytes
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule


@dataclass(frozen=True)
class KSplits:
    """K split into separate chains (`pallas_kernels.contract.SplitWgmmaContract`).

    Attributes:
        count: Number of K splits, at least 2.
        length: Elements per K split, a multiple of the schedule's `k_step`.
        parts: Parts of K that separate blocks sum, each a subtree of K splits; another kernel adds the rest of the
            tree. Divides `count`; 1 if a block sums all K splits.
    """

    count: int
    length: int
    parts: int


@in_32_bits
def ring_matmul(
    x: jax.Array,
    w: jax.Array,
    epilogue: Epilogue,
    *,
    total: jax.Array | None = None,
    sizes: jax.Array | None = None,
    fills: bool = True,
    schedule: MatmulSchedule,
    transpose_w: bool,
    transpose_x: bool = False,
    out_dtype: Any,
    interpret: Any,
    splits: KSplits | None = None,
    folded: bool = False,
) -> jax.Array:
    """Runs the kernel on operands that TMA can address.

    Args:
        x: (M, K), or a stack (B, M, K); K a multiple of 8 (of 16 for int8), M and B at least 1. (K, M) with
            `transpose_x`, where M is a multiple of 16. A matrix is shared by every entry of a stack of `w`.
        w: (K, N), or (N, K) with `transpose_w`, of the same 2-byte dtype; N a multiple of 8, and of 16 for (K, N)
            weights. Also a stack, or with `transpose_x` a matrix shared by every entry. int8 (K, N) weights, N a
            multiple of 32, are transposed in shared memory.
        epilogue: Operations on the sums before they are rounded; scales for int8.
        total: (M', N') or a stack of them, float32, the initial sums; M' and N' are multiples of a block's tile, at
            least M and N. By default sums start at zero. Not with `swap`.
        sizes: (B,) int32, the number of consecutive rows of a matrix `x` for each entry of `w`. Rows after them become
            zeros; if sizes are negative or add up to more than M, all become nan. Without `swap`, a tile has whole
            swizzled rows of the result.
        fills: Whether rows after those of `sizes` are written if sizes are valid.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        transpose_x: Whether `x` is stored as (K, M).
        out_dtype: Dtype of the result; rounded once from the float32 accumulator.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        splits: The K splits, for matrices; one chain by default.
        folded: Whether every step is a separate chain, and their sums are added in ascending order in float32.

    Returns:
        (M, N) or (B, M, N) of `out_dtype`; with several parts of K (parts, M, N), the partial sums.
    """
    stack, n, s = max(x.shape[:-2], w.shape[:-2]), w.shape[-2 if transpose_w else -1], schedule
    if sizes is not None:
        stack = ()
    m, k = x.shape[:-3:-1] if transpose_x else x.shape[-2:]
    length, chains, part_length = k, 1, None
    if splits is not None:
        length, chains, stack = splits.length, splits.count // splits.parts, ()
        if splits.parts > 1:
            stack, part_length = (splits.parts,), chains * length
    if folded:
        length, chains = s.k_step, -(-k // s.k_step)
    x_side, w_side = _operands(m, k, n, x.dtype, epilogue, s, transpose_x, transpose_w)
    transposed_w = None
    if x.dtype == jnp.int8 and not transpose_w:
        transposed_w = w_side
        x_side = replace(x_side, swizzle=SWIZZLE_BYTES)
        w_side = Operand(w_side.tile * w_side.tiles, s.k_step, True, w_side.tile, w_side.tile, SWIZZLE_BYTES, s.k_step)
    scheduler: TileScheduler | GroupTileScheduler
    if sizes is not None:
        x_side = replace(x_side, anywhere=True)
        scheduler = group_scheduler(sizes.shape[0], m, n, s)
    rows, columns = (w_side, x_side) if s.swap else (x_side, w_side)
    if sizes is None:
        scheduler = TileScheduler(stack, rows.tiles, columns.tiles, rows.tile, columns.tile, s.group, s.blocks)
    chain_steps, more_steps = -(-length // s.k_step), 0
    if epilogue.residual is not None and not (stack or splits or folded or transpose_x or sizes is not None):
        more_steps = residual_steps(s, m, k, n, not transpose_w and x.dtype == out_dtype == jnp.bfloat16)
    shape = (s.tile_rows // rows.sources, s.tile_columns // columns.sources)
    kind = "quant_matmul" if x.dtype == jnp.int8 else "gated_matmul" if epilogue.gated else "matmul"
    fetches = epilogue.residual is not None and not more_steps
    store = make_store(s, shape, m, n, jnp.dtype(out_dtype), epilogue, in_groups=sizes is not None, fetches=fetches)
    plan = _Plan(
        name=kind if sizes is None else f"group_{kind}",
        schedule=s,
        rows=rows,
        columns=columns,
        scheduler=scheduler,
        ring=Ring.of(scheduler, chains * chain_steps + more_steps, s.stages),
        roles=Roles(s.warpgroups, 0 if transposed_w is None else 1),
        shape=shape,
        store=store,
        interpret=interpret,
        transposed_w=transposed_w,
        chains=chains,
        chain_steps=chain_steps,
        more_steps=more_steps,
        part_length=part_length,
        sums=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
        folded=folded,
        fills=fills,
        in_result=_waits_in_result(s, chains, store, epilogue, x.dtype, out_dtype),
    )
    scratch = plan.scratch(x.dtype, out_dtype, epilogue)
    if plan.tree is None or not plan.tree.in_memory or plan.in_result:
        run = plan.launch(functools.partial(_kernel, plan), (*stack, m, n), out_dtype, scratch)
        return run(x, w, total, sizes, epilogue)

    def kernel(x: Any, w: Any, epilogue: Any, out: Any, waiting: Any, scratch: Any) -> None:
        _kernel(plan, x, w, None, None, epilogue, out, scratch._replace(waiting=waiting))

    workspace = plan.tree.workspace(scheduler.blocks)
    result: jax.Array = plan.launch(kernel, (*stack, m, n), out_dtype, scratch, workspace)(x, w, epilogue)[0]
    return result


def _waits_in_result(
    s: MatmulSchedule, chains: int, store: Store, epilogue: Epilogue, dtype: Any, out_dtype: Any
) -> bool:
    """Returns whether sums of a tree over chains wait in the shared memory from which the result is stored."""
    sizes = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype).itemsize
    return (
        chains & (chains - 1) == 0
        and epilogue.residual is None  # it is fetched there while the products are summed
        and (size := waiting_bytes(s, chains)) > 0
        and store.holds(size // s.warpgroups, out_dtype)
        and shared_bytes(s, chains, *sizes) <= SHARED_BYTES
    )


def group_scheduler(groups: int, m: int, n: int, s: MatmulSchedule) -> GroupTileScheduler:
    """Returns the tile scheduler of an (M, N) result with rows in groups."""
    table = Table(groups, m, s.block_m)
    blocks = max(1, min(s.blocks or SMS, -(-n // s.block_n) * (table.most_tiles + 1)))
    return GroupTileScheduler(table, n, s.block_n, s.swap, s.group, blocks)


def _operands(
    m: int, k: int, n: int, dtype: Any, epilogue: Epilogue, s: MatmulSchedule, transpose_x: bool, transpose_w: bool
) -> tuple[Operand, Operand]:
    """Returns the shared-memory operands of the activations and the weights."""
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


@dataclass(frozen=True, kw_only=True)
class _Plan(Product):
    """The static parameters of a launch.

    Attributes:
        transposed_w: The weights as they are copied if a warpgroup transposes them before they are read; else None.
        chains: Chains over K in a tile, added as a tree or in ascending order.
        chain_steps: Steps of one chain.
        more_steps: Steps after those of all chains, which bring the residual into the stages of the rows.
        part_length: Elements of the part of K that a stack entry represents; None for a stack of results.
        sums: Dtype of the sums.
        folded: Whether the chains are added in ascending order.
        fills: Whether rows without a group are written.
        in_result: Whether sums of the tree wait in the shared memory from which the result is stored.
    """

    transposed_w: Operand | None
    chains: int
    chain_steps: int
    more_steps: int
    part_length: int | None
    sums: Any
    folded: bool
    fills: bool
    in_result: bool

    @property
    def copied(self) -> tuple[Operand, Operand]:
        """Rows and columns as they are copied."""
        if self.transposed_w is None:
            return self.rows, self.columns
        return (self.transposed_w, self.columns) if self.schedule.swap else (self.rows, self.transposed_w)

    @property
    def tree(self) -> LeafTree | None:
        """The tree over the chains of a tile; None for one chain, or chains that are added in ascending order."""
        if self.folded or self.chains == 1:
            return None
        return LeafTree(self.chains, self.shape, self.schedule.warpgroups, self.interpret, self.in_result)

    @property
    def sums_memory(self) -> Any:
        """The shared memory in which sums of the tree wait; None if they do not."""
        if self.tree is None or not self.in_result:
            return None
        size = math.prod(self.shape)
        return plgpu.SMEM((self.schedule.warpgroups, self.tree.in_memory, size), jnp.dtype(jnp.float32))

    @property
    def consumers(self) -> int:
        """Number of consumers that take tiles in turn."""
        return self.schedule.warpgroups if self.schedule.split == "tiles" else 1

    def scratch(self, dtype: Any, out_dtype: Any, epilogue: Epilogue) -> Scratch:
        """Returns the shared memory and the barriers of a block."""
        stages, copies = self.ring.stages, sum(operand.arrivals for operand in self.copied)
        scratch = Scratch(
            rows=self.stages(self.rows, dtype),
            columns=self.stages(self.columns, dtype),
            store=self.blocks(out_dtype, None if self.interpret else self.sums_memory),
            full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages * self.consumers),
            empty=plgpu.Barrier(num_arrivals=self.schedule.warpgroups // self.consumers, num_barriers=stages),
            waiting=self.sums_memory if self.interpret else None,
        )
        if self.store.fetches:
            barrier = self.store.barrier(self.schedule.warpgroups, self.plain(self.store))
            scratch = scratch._replace(fetched=barrier)
        if self.transposed_w is not None:
            tiles, weights = (
                self.transposed_w.scratch(stages, dtype, False),
                "rows" if self.schedule.swap else "columns",
            )
            shared = {"apart": tiles} if self.interpret else {weights: plgpu.RefUnion(getattr(scratch, weights), tiles)}
            scratch = scratch._replace(transposed=plgpu.Barrier(num_barriers=stages), **shared)
        if isinstance(self.scheduler, GroupTileScheduler):
            scratch = scratch._replace(table=self.scheduler.table.scratch(), ready=plgpu.Barrier())
        return scratch

    def full(self, scratch: Scratch, tile: Any, slot: Any) -> Any:
        """The barrier of a full stage: one per consumer, since every consumer must wait on every phase."""
        consumers = self.consumers
        return scratch.full.at[slot if consumers == 1 else lax.rem(tile, consumers) * self.ring.stages + slot]


def _kernel(
    plan: _Plan, x: Any, w: Any, total: Any, sizes: Any, epilogue: Epilogue, out: Any, scratch: Scratch
) -> None:
    """The body of a block."""
    if plan.in_result and not plan.interpret:
        *store, waiting = scratch.store
        scratch = scratch._replace(store=store if len(store) > 1 else store[0], waiting=waiting)
    s, ring, scheduler, (warpgroup, block) = plan.schedule, plan.ring, plan.scheduler, here()
    if sizes is not None:
        fill_table(scheduler.table, sizes, scratch, warpgroup, plan.interpret)
        scheduler = scheduler.of(scratch.table)
    count = scheduler.count(block)
    weights = [w] if epilogue.up is None else [w, epilogue.up]
    sources = (weights, [x]) if s.swap else ([x], weights)
    rows, columns = plan.views(plan.rows, scratch.rows), plan.views(plan.columns, scratch.columns)
    if plan.transposed_w is not None:
        ref = scratch.rows if s.swap else scratch.columns
        weights_stages = (ref, scratch.apart) if plan.interpret else tuple(ref)
        rows, columns = (weights_stages, columns) if s.swap else (rows, weights_stages)

    @pl.when(warpgroup == s.warpgroups + plan.roles.transpose)
    def copy_tiles() -> None:
        plan.roles.limit_registers("copy")

        def begin(tile: Any) -> tuple[Place, Any]:
            place = scheduler.place(block, tile)
            return place, 0 if plan.part_length is None else place.entry * plan.part_length

        def copy(begun: tuple[Place, Any], tile: Any, step: Any, slot: Any) -> None:
            place, start = begun
            if not plan.more_steps:
                copy_operands(place, start, tile, step, slot)
                return
            operands = step < plan.chains * plan.chain_steps
            pl.when(operands)(lambda: copy_operands(place, start, tile, step, slot))
            pl.when(~operands)(lambda: _copy_residual(plan, scratch, epilogue, rows[1], place, tile, step, slot))

        def copy_operands(place: Place, start: Any, tile: Any, step: Any, slot: Any) -> None:
            starts = place.row, place.column
            for operand, arrays, (_, target), first in zip(plan.copied, sources, (rows, columns), starts, strict=True):
                k, full = start + step * s.k_step, plan.full(scratch, tile, slot)
                operand.copy([in_stack(array, place.entry) for array in arrays], target, first, k, slot, full)

        ring.produce(count, scratch.empty, begin, copy)

    if plan.transposed_w is not None:

        @pl.when(warpgroup == s.warpgroups)
        def transpose_weights() -> None:
            plan.roles.limit_registers("transpose")
            read, copied = rows if s.swap else columns

            @pl.loop(0, count * ring.steps)
            def _(position: Any) -> None:
                slot = ring.at(position)
                plgpu.barrier_wait(scratch.full.at[slot])
                _turn(plan, copied.at[slot, 0], read.at[slot, 0])
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch.transposed.at[slot])

    @pl.when(warpgroup < s.warpgroups)
    def multiply_tiles() -> None:
        plan.roles.limit_registers("multiply")
        offset, consumers = plan.offset(warpgroup), plan.consumers
        ending, part = plan.ending(epilogue, out, scratch, warpgroup), plan.part(offset)
        waiting = scratch.waiting
        if waiting is not None:
            waiting = waiting.at[warpgroup if plan.in_result else (block, warpgroup)]
        stages = scratch._replace(rows=rows[0], columns=columns[0])

        @pl.loop(0, count if consumers == 1 else lax.div(count - warpgroup + consumers - 1, consumers))
        def _(turn: Any) -> None:
            tile = turn if consumers == 1 else turn * consumers + warpgroup
            _, entry, row, column, valid = scheduler.place(block, tile)
            row = row + offset
            ending.begin(entry, row, column, plan.shape)

            def previous() -> Any:
                """Returns this warpgroup's part of the initial sums."""
                at = pl.ds(row, plan.shape[0]), pl.ds(column, plan.shape[1])
                return plgpu.load(in_stack(total, entry).at[at], layout=plgpu.Layout.WGMMA, optimized=False)

            def chain(index: Any) -> Any:
                return _sum_chains(plan, stages, tile, index, part=part, previous=None if total is None else previous)

            if plan.tree is not None:
                several = functools.partial(_sum_chains, plan, stages, tile, part=part)
                sums = (plan.tree.add(several, waiting),)
            elif not plan.folded:
                sums = chain(0)
            else:
                sums = lax.fori_loop(1, plan.chains, lambda i, sums: add_tiles(sums, chain(i)), chain(0))
            # The valid rows are counted from the first row of this warpgroup.
            valid = valid if valid is None or s.swap else valid - offset
            slots = [ring.slot(tile, plan.chains * plan.chain_steps + i) for i in range(plan.more_steps)]
            for slot in slots:
                plgpu.barrier_wait(plan.full(scratch, tile, slot))

            def residual(i: int, j: int) -> Any:
                at = pl.ds(offset + i, ending.store.rows)
                return stages.rows.at[slots[j // s.k_step], 0, at]

            ending.finish(sums, entry, row, column, valid, residual if slots else None)
            for slot in slots:  # every warp has read: the tile has been written to shared memory since
                plgpu.barrier_arrive(scratch.empty.at[slot])

        if sizes is not None:
            _fill_rest(plan, scheduler, ending, warpgroup, block, count)
        plgpu.wait_smem_to_gmem(0)


def _copy_residual(
    plan: _Plan, scratch: Scratch, epilogue: Epilogue, rows: Any, place: Place, tile: Any, step: Any, slot: Any
) -> None:
    """Starts the copies of 64 columns of a tile's residual, as many as a stage has operands."""
    s, full = plan.schedule, plan.full(scratch, tile, slot)
    column = place.column + (step - plan.chains * plan.chain_steps) * s.k_step
    pieces = sum(operand.arrivals for operand in plan.copied)
    height = s.block_rows // pieces
    source = in_stack(epilogue.residual, place.entry)
    for i in range(pieces):
        at = pl.ds(place.row + i * height, height), pl.ds(column, s.k_step)
        plgpu.copy_gmem_to_smem(source.at[at], rows.at[slot, 0, pl.ds(i * height, height)], full)


def _turn(plan: _Plan, source: Any, target: Any) -> None:
    """Transposes the weights of a stage."""
    s, copied, read = plan.schedule, plan.transposed_w, plan.rows if plan.schedule.swap else plan.columns
    if plan.interpret or copied is None:
        target[...] = source[...].T
    else:
        transforms = tile_transforms(copied.swizzle, jnp.int8), tile_transforms(read.swizzle, jnp.int8)
        transpose_bytes(source, target, s.k_step, copied.tile, copied.swizzle, transforms)


def _sum_chains(
    plan: _Plan,
    scratch: Scratch,
    tile: Any,
    index: Any,
    count: int = 1,
    *,
    part: Any,
    previous: Callable[[], Any] | None = None,
) -> tuple[Any, ...]:
    """Sums the steps of `count` chains of a tile from `index` on; `part` is this warpgroup's rows.

    Returns:
        The sums of each chain, of each source.
    """
    pieces = max(plan.rows.pieces, plan.columns.pieces)  # products of a step per source
    sources = max(plan.rows.sources, plan.columns.sources)
    bounds = [(index + chain) * plan.chain_steps for chain in range(count + 1)]

    def accumulate(*accumulators: Any) -> Any:
        def multiply(chain: int, step: Any) -> None:
            slot = plan.ring.slot(tile, step)
            plgpu.barrier_wait(plan.full(scratch, tile, slot))
            if scratch.transposed is not None:
                plgpu.barrier_wait(scratch.transposed.at[slot])
            for piece in range(pieces):
                for source, accumulator in enumerate(accumulators[chain * sources : (chain + 1) * sources]):
                    left = plan.rows.read(scratch.rows, slot, source, piece, pieces, part)
                    right = plan.columns.read(scratch.columns, slot, source, piece, pieces, slice(None))
                    plgpu.wgmma(accumulator, left, right.transpose((1, 0)))

        def release(step: Any) -> None:
            plgpu.barrier_arrive(scratch.empty.at[plan.ring.slot(tile, step)])

        if previous is not None and not plan.interpret:
            accumulators[0][...] = previous()
        sum_steps(bounds, multiply, release, products=pieces * sources, several=plan.chain_steps > 1)
        results = tuple(accumulator[...] for accumulator in accumulators)
        if previous is not None and plan.interpret:
            # The interpreter cannot store to an accumulator, so it adds in another order.
            return (results[0] + previous(),)
        return results

    accumulators = [plgpu.WGMMAAccumulatorRef(plan.shape, plan.sums)] * (count * sources)
    sums: tuple[Any, ...] = pl.run_scoped(accumulate, *accumulators)
    return sums


def _fill_rest(
    plan: _Plan, scheduler: TableTileScheduler, ending: Ending, warpgroup: Any, block: Any, count: Any
) -> None:
    """Stores zeros for rows without a group if they are to be written, or nan if the group sizes are invalid."""
    consumers, offset, turns = plan.consumers, plan.offset(warpgroup), scheduler.turns(block)
    if not plan.fills:
        turns = jnp.where(scheduler.fit, count, turns)

    @pl.loop(count, turns)
    def _(turn: Any) -> None:
        @pl.when(lax.rem(turn, consumers) == (warpgroup if consumers > 1 else 0))
        def _() -> None:
            row, column = scheduler.rest(block, turn)
            number = jnp.where(scheduler.fit, jnp.float32(0), jnp.float32(jnp.nan))
            tile = plgpu.layout_cast(jnp.broadcast_to(number, plan.shape), plgpu.Layout.WGMMA)
            ending.fill(tile, row + offset, column)
