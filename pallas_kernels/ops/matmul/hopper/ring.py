"""The kernel of the Hopper matmul: one producer warpgroup, one or more computing ones, a ring of stages between them.

The producer copies tiles of both operands into shared memory (TMA), the computing warpgroups multiply them (wgmma)
into float32 accumulators and write the result. Every accumulator is one chain over K upwards in steps of 16, whatever
the schedule: tiles, stages and clusters decide who computes an element and when, never in which order it is summed.
What happens to a finished accumulator is `hopper.epilogue`.

wgmma multiplies rows by columns. With `schedule.swap` the weights are the rows and the activations the columns, so
that a small batch fills 8 columns instead of 64 rows; without it the activations are the rows.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import add_as_tree
from pallas_kernels.ops.matmul.hopper.epilogue import (
    ROWS,
    SWIZZLE_BYTES,
    Ending,
    Epilogue,
    add_tiles,
    in_stack,
    make_store,
    tile_transforms,
)
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_PRODUCER_REGISTERS: Final = 40
_COMPUTE_REGISTERS: Final = {2: 232, 3: 152}


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


@dataclass(frozen=True)
class _Side:
    """One operand as wgmma sees it: `size` rows (or columns) of `k` elements.

    Attributes:
        size: Rows or columns of the whole operand.
        k: Length of the contracted dimension.
        k_major: Whether K is the contiguous dimension in memory.
        tile: Rows or columns of a block's tile in each source.
        loaded: How many of them are copied; the others are never read by what is stored.
        swizzle: Elements of a swizzled row.
        k_step: Elements of K in a stage.
        sources: Operands of this shape, 1 or 2; each has an accumulator of its own.
    """

    size: int
    k: int
    k_major: bool
    tile: int
    loaded: int
    swizzle: int
    k_step: int
    sources: int = 1

    @property
    def ragged(self) -> bool:
        """Whether the operand does not divide into the whole (8, swizzle) tiles that wgmma reads.

        Fewer than 8 rows are one tile. An operand stored with K in front divides: its K is a multiple of 8, its swizzle
        divides its size.
        """
        return self.k_major and ((self.size % ROWS != 0 and self.size > ROWS) or self.k % self.swizzle != 0)

    @property
    def pieces(self) -> int:
        """Copies per stage and source.

        A ragged operand is copied in pieces one swizzled row wide: such a piece is plain rows in memory order, for
        which the copy engine handles any edge.
        """
        return self.k_step // self.swizzle if self.ragged else 1

    def shape(self, stages: int) -> tuple[int, ...]:
        if not self.k_major:
            return (stages, self.sources, self.k_step, self.tile)
        return (stages, self.sources * self.pieces, self.tile, self.k_step // self.pieces)

    def scratch(self, stages: int, dtype: Any, alias: bool) -> Any:
        """Shared memory of the stages; with `alias` also as plain rows, for copies in pieces."""
        transforms = tile_transforms(self.swizzle, dtype)
        tiled = plgpu.SMEM(self.shape(stages), dtype, transforms=transforms)
        if not alias:
            return tiled
        return plgpu.RefUnion(tiled, plgpu.SMEM(self.shape(stages), dtype, transforms=transforms[1:]))

    def copy(self, sources: Any, target: Any, start: Any, k: Any, slot: Any, barrier: Any, axes: Any) -> None:
        """Starts the copies of one stage."""
        size = pl.ds(start, self.loaded)
        for index, source in enumerate(sources):
            for piece in range(self.pieces):
                place = target.at[slot, index * self.pieces + piece]
                if self.k_major:
                    width = self.k_step // self.pieces
                    window = source.at[size, pl.ds(k + piece * width, width)]
                    place = place.at[pl.ds(0, self.loaded)]
                else:
                    window = source.at[pl.ds(k, self.k_step), size]
                plgpu.copy_gmem_to_smem(window, place, barrier, collective_axes=axes)

    def operand(self, ref: Any, slot: Any, source: int, piece: int, pieces: int, part: Any) -> Any:
        """Returns the rows or columns `part` of piece `piece` of `pieces` of a stage, as (part, K).

        A side with one source has it wherever the other side has two.
        """
        first = source % self.sources * self.pieces
        width = self.k_step // pieces
        window: Any = slice(None)
        if self.pieces == pieces:
            ref = ref.at[slot, first + piece]
        else:
            ref, window = ref.at[slot, first], pl.ds(piece * width, width)
        if self.k_major:
            return ref.at[part, window]
        return ref.at[window, part].transpose((1, 0))


@in_32_bits
def ring_matmul(
    x: jax.Array,
    w: jax.Array,
    epilogue: Epilogue,
    *,
    total: jax.Array | None = None,
    schedule: MatmulSchedule,
    transpose_w: bool,
    transpose_x: bool = False,
    out_dtype: Any,
    interpret: Any,
    shards: Shards | None = None,
) -> jax.Array:
    """Runs the kernel on operands that the copy engine can address.

    Args:
        x: (M, K), or a stack (B, M, K); K a multiple of 8, M and B at least 1. (K, M) with `transpose_x`, where M is a
            multiple of 16. A matrix beside a stack of `w` belongs to every entry.
        w: (K, N), or (N, K) with `transpose_w`, of the same 2-byte dtype; N a multiple of 8, and of 16 where the
            weights are (K, N). A stack too, or with `transpose_x` a matrix that belongs to every entry.
        epilogue: What is done to the float32 sums before they are rounded.
        total: (M', N') or a stack of them, float32, with which the sums start; M' and N' are multiples of what a
            cluster computes and at least M and N. Without it they start at zero. Not for a schedule with `swap`.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        transpose_x: Whether `x` is stored as (K, M).
        out_dtype: Dtype of the result; rounded from the float32 accumulator once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        shards: The cut of K, for matrices; by default there is one chain.

    Returns:
        (M, N) or (B, M, N) of `out_dtype`; with shards across blocks (count, M, N), the shards' own sums.
    """
    stack, n, s = max(x.shape[:-2], w.shape[:-2]), w.shape[-2 if transpose_w else -1], schedule
    m, k = x.shape[:-3:-1] if transpose_x else x.shape[-2:]
    across, length, chains = False, k, 1
    if shards is not None:
        across, length = shards.across, shards.length
        stack, chains = ((shards.count,), 1) if shards.across else ((), shards.count)
    sources = 2 if epilogue.gated else 1
    swizzle, w_tile = SWIZZLE_BYTES // x.dtype.itemsize, s.block_n // sources
    if not transpose_w:
        swizzle = math.gcd(swizzle, n, w_tile)
    if transpose_x:
        swizzle = math.gcd(swizzle, m, s.block_m)
    x_size = s.block_m if transpose_x or m > s.block_m else min(s.block_m, -(-m // ROWS) * ROWS)
    x_side = _Side(m, k, not transpose_x, s.block_m, x_size, swizzle, s.k_step)
    w_side = _Side(n, k, transpose_w, w_tile, w_tile, swizzle, s.k_step, sources)
    rows, columns = (w_side, x_side) if s.swap else (x_side, w_side)
    row_tiles = _cdiv(rows.size, rows.tile * s.cluster_rows)
    column_tiles = _cdiv(columns.size, columns.tile * s.cluster_columns)
    tiles, cluster = math.prod(stack) * row_tiles * column_tiles, s.cluster_rows * s.cluster_columns
    chain_steps = _cdiv(length, s.k_step)
    k_steps = chains * chain_steps
    clusters = min(tiles, s.clusters) if s.clusters else tiles
    stages = min(s.stages, k_steps * _cdiv(tiles, clusters))
    shape = (s.tile_rows // rows.sources, s.tile_columns // columns.sources)  # of an accumulator
    store = make_store(s, shape, m, n, jnp.dtype(out_dtype), epilogue)
    pieces = max(rows.pieces, columns.pieces)
    takers = s.warpgroups if s.split == "tiles" else 1  # warpgroups that take tiles in turn
    alias = [not interpret and ragged for ragged in (rows.ragged, columns.ragged, store.ragged)]
    collective = ("member",) if cluster > 1 else None

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        total_ref, refs = (None, refs) if total is None else (refs[0], refs[1:])
        up_ref, bias_ref, residual_ref, (out_ref, *scratch) = epilogue.take(refs)
        (rows_ref, rows_in), (columns_ref, columns_in), (out_tiled, out_plain) = (
            ref if aliased else (ref, None) for ref, aliased in zip(scratch, alias, strict=False)
        )
        full, empty, *fetched = scratch[3:]
        weights = [w_ref] if up_ref is None else [w_ref, up_ref]
        warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("cluster")
        member = lax.axis_index("member") if cluster > 1 else 0
        count = lax.div(tiles - first + clusters - 1, clusters)

        def origin(tile: Any) -> tuple[Any, Any, Any]:
            """Place in the stack, first row and first column of this block's tile."""
            index = first + tile * clusters
            place = lax.div(index, row_tiles * column_tiles) if stack else None
            index = lax.rem(index, row_tiles * column_tiles) if stack else index
            row, column = _tile_position(index, row_tiles, column_tiles, s.group)
            if s.cluster_rows > 1:
                row = row * cluster + member
            elif s.cluster_columns > 1:
                column = column * cluster + member
            return place, row * rows.tile, column * columns.tile

        def arrival(tile: Any, slot: Any) -> Any:
            """The barrier of a stage: one for each taker, because a barrier must see all who wait wait each time."""
            return slot if takers == 1 else lax.rem(tile, takers) * stages + slot

        def copy_rows(place: Any, row: Any, k: Any, slot: Any, ready: Any) -> None:
            sources = [in_stack(ref, place) for ref in (weights if s.swap else [x_ref])]
            target = rows_ref if rows_in is None else rows_in
            rows.copy(sources, target, row, k, slot, ready, collective if s.cluster_columns > 1 else None)

        def copy_columns(place: Any, column: Any, k: Any, slot: Any, ready: Any) -> None:
            sources = [in_stack(ref, place) for ref in ([x_ref] if s.swap else weights)]
            target = columns_ref if columns_in is None else columns_in
            columns.copy(sources, target, column, k, slot, ready, collective if s.cluster_rows > 1 else None)

        def produce() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                place, row, column = origin(tile)
                start = place * length if across else 0

                @pl.loop(0, k_steps)
                def _(step: Any) -> None:
                    position = tile * k_steps + step
                    slot = lax.rem(position, stages)

                    @pl.when(position >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    copy_rows(place, row, start + step * s.k_step, slot, full.at[arrival(tile, slot)])
                    copy_columns(place, column, start + step * s.k_step, slot, full.at[arrival(tile, slot)])

            # Every signal is awaited: a neighbour in the cluster may still write to this block's shared memory.
            total = count * k_steps

            @pl.loop(0, jnp.minimum(total, stages))
            def _(i: Any) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(jnp.maximum(total - stages, 0) + i, stages)])

        def consume() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(_COMPUTE_REGISTERS[s.warpgroups], action="increase")
            row_offset = warpgroup * shape[0] if s.split == "rows" else 0
            column_offset = warpgroup * shape[1] if s.split == "columns" else 0
            ending = Ending(
                epilogue,
                store,
                s.swap,
                out_ref,
                out_tiled.at[warpgroup],
                None if out_plain is None else out_plain.at[warpgroup],
                bias_ref,
                residual_ref,
                fetched[0].at[warpgroup] if fetched else None,
                interpret,
            )
            row_part = pl.ds(row_offset, shape[0]) if rows.tile > shape[0] else slice(None)
            column_part = pl.ds(column_offset, shape[1]) if columns.tile > shape[1] else slice(None)

            @pl.loop(0, count if takers == 1 else lax.div(count - warpgroup + takers - 1, takers))
            def _(turn: Any) -> None:
                tile = turn if takers == 1 else turn * takers + warpgroup
                place, row, column = origin(tile)
                row, column = row + row_offset, column + column_offset
                ending.begin(place, row, column, shape)

                def multiply(accumulators: Any, step: Any) -> None:
                    slot = lax.rem(tile * k_steps + step, stages)
                    plgpu.barrier_wait(full.at[arrival(tile, slot)])
                    for piece in range(pieces):
                        for source, accumulator in enumerate(accumulators):
                            left = rows.operand(rows_ref, slot, source, piece, pieces, row_part)
                            right = columns.operand(columns_ref, slot, source, piece, pieces, column_part)
                            plgpu.wgmma(accumulator, left, right.transpose((1, 0)))

                def release(step: Any) -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(tile * k_steps + step, stages)])

                def previous() -> Any:
                    """Returns this warpgroup's part of the sums to continue."""
                    at = pl.ds(row, shape[0]), pl.ds(column, shape[1])
                    return plgpu.load(in_stack(total_ref, place).at[at], layout=plgpu.Layout.WGMMA, optimized=False)

                def chain(index: int) -> Any:
                    """Sums the steps of one chain."""
                    first, last = index * chain_steps, (index + 1) * chain_steps

                    def accumulate(*accumulators: Any) -> Any:
                        if total_ref is not None and not interpret:
                            accumulators[0][...] = previous()
                        multiply(accumulators, first)

                        @pl.loop(first + 1, last)
                        def _(step: Any) -> None:
                            multiply(accumulators, step)
                            # The products of the step before are done, this one's go on.
                            plgpu.wgmma_wait(pieces * sources)
                            release(step - 1)

                        plgpu.wgmma_wait(0)
                        release(last - 1)
                        results = tuple(accumulator[...] for accumulator in accumulators)
                        if total_ref is not None and interpret:
                            # The interpreter cannot store to an accumulator: another order.
                            return (results[0] + previous(),)
                        return results

                    scratch = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * sources
                    return pl.run_scoped(accumulate, *scratch)

                ending.finish(add_as_tree(chain, chains, add_tiles), place, row, column)

            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == s.warpgroups)(produce)
        pl.when(warpgroup < s.warpgroups)(consume)

    barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("member",)) if cluster > 1 else plgpu.Barrier
    launch = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*stack, m, n), out_dtype),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("member",) if cluster > 1 else (),
        num_threads=s.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            rows.scratch(stages, x.dtype, alias[0]),
            columns.scratch(stages, x.dtype, alias[1]),
            store.scratch(s.warpgroups, out_dtype, alias[2]),
            plgpu.Barrier(
                num_arrivals=rows.pieces * rows.sources + columns.pieces * columns.sources,
                num_barriers=stages * takers,
            ),
            barrier(num_arrivals=s.warpgroups // takers, num_barriers=stages),
            *([] if epilogue.residual is None else [store.barrier(s.warpgroups, alias[2])]),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    result: jax.Array = launch(x, w, *([] if total is None else [total]), *epilogue.inputs)
    return result


def _tile_position(index: Any, row_tiles: int, column_tiles: int, group: int) -> tuple[Any, Any]:
    """Walks the tiles in bands of `group` rows, so that blocks that run together share operands in the L2 cache."""
    band = lax.div(index, group * column_tiles)
    inside = lax.rem(index, group * column_tiles)
    height = jnp.minimum(row_tiles - band * group, group)
    return band * group + lax.rem(inside, height), lax.div(inside, height)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
