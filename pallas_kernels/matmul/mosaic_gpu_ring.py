"""The kernel of the Hopper matmul: one producer warpgroup, one or more computing ones, a ring of stages between them.

The producer copies tiles of both operands into shared memory (TMA), the computing warpgroups multiply them (wgmma)
into float32 accumulators and write the result. Every accumulator is one chain over K upwards in steps of 16, whatever
the schedule: tiles, stages and clusters decide who computes an element and when, never in which order it is summed.

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

from pallas_kernels.schedule.hopper import MatmulSchedule

SWIZZLE_BYTES: Final = 128
"""Bytes of a shared memory row that wgmma reads without bank conflicts."""

_ROWS: Final = 8  # rows of one swizzled core matrix
_WGMMA_ROWS: Final = 64
_PRODUCER_REGISTERS: Final = 40
_COMPUTE_REGISTERS: Final = {2: 232, 3: 152}


@dataclass(frozen=True)
class _Side:
    """One operand as wgmma sees it: `size` rows (or columns) of `k` elements.

    Attributes:
        size: Rows or columns of the whole operand.
        k: Length of the contracted dimension.
        k_major: Whether K is the contiguous dimension in memory.
        tile: Rows or columns of a block's tile.
        loaded: How many of them are copied; the others are never read by what is stored.
        swizzle: Elements of a swizzled row.
        k_step: Elements of K in a stage.
    """

    size: int
    k: int
    k_major: bool
    tile: int
    loaded: int
    swizzle: int
    k_step: int

    @property
    def ragged(self) -> bool:
        """Whether the operand does not divide into the whole (8, swizzle) tiles that wgmma reads.

        Fewer than 8 rows are one tile. An operand stored with K in front divides: its K is a multiple of 8, its swizzle
        divides its size.
        """
        return self.k_major and ((self.size % _ROWS != 0 and self.size > _ROWS) or self.k % self.swizzle != 0)

    @property
    def pieces(self) -> int:
        """Copies per stage.

        A ragged operand is copied in pieces one swizzled row wide: such a piece is plain rows in memory order, for
        which the copy engine handles any edge.
        """
        return self.k_step // self.swizzle if self.ragged else 1

    def shape(self, stages: int) -> tuple[int, ...]:
        if not self.k_major:
            return (stages, 1, self.k_step, self.tile)
        return (stages, self.pieces, self.tile, self.k_step // self.pieces)

    def scratch(self, stages: int, dtype: Any, alias: bool) -> Any:
        """Shared memory of the stages; with `alias` also as plain rows, for copies in pieces."""
        transforms = _transforms(self.swizzle, dtype)
        tiled = plgpu.SMEM(self.shape(stages), dtype, transforms=transforms)
        if not alias:
            return tiled
        return plgpu.RefUnion(tiled, plgpu.SMEM(self.shape(stages), dtype, transforms=transforms[1:]))

    def copy(self, source: Any, target: Any, start: Any, k: Any, slot: Any, barrier: Any, axes: Any) -> None:
        """Starts the copies of one stage."""
        for piece in range(self.pieces):
            size = pl.ds(start, self.loaded)
            if self.k_major:
                width = self.k_step // self.pieces
                window = source.at[size, pl.ds(k + piece * width, width)]
                place = target.at[slot, piece, pl.ds(0, self.loaded)]
            else:
                window = source.at[pl.ds(k, self.k_step), size]
                place = target.at[slot, piece]
            plgpu.copy_gmem_to_smem(window, place, barrier, collective_axes=axes)

    def operand(self, ref: Any, slot: Any, piece: int, pieces: int, part: Any) -> Any:
        """Returns the rows or columns `part` of piece `piece` of `pieces` of a stage, as (part, K)."""
        width = self.k_step // pieces
        window: Any = slice(None)
        if self.pieces == pieces:
            ref = ref.at[slot, piece]
        else:
            ref, window = ref.at[slot, 0], pl.ds(piece * width, width)
        if self.k_major:
            return ref.at[part, window]
        return ref.at[window, part].transpose((1, 0))


@dataclass(frozen=True)
class _Store:
    """How one warpgroup hands its (tile_m, tile_n) part of the result to memory, a (rows, width) block at a time.

    Attributes:
        rows: Rows of the result in a block.
        width: Columns of the result in a block.
        swizzle: Elements of a swizzled row.
        ragged: Whether the result does not divide into whole (8, swizzle) tiles.
        buffers: Blocks that can be on their way to memory.
    """

    rows: int
    width: int
    swizzle: int
    ragged: bool
    buffers: int

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First row and column of the pieces of a block that are plain rows in memory order."""
        return [(i, j) for i in range(0, self.rows, self.piece_rows) for j in range(0, self.width, self.swizzle)]

    @property
    def piece_rows(self) -> int:
        """Rows of such a piece: a block that is one swizzled row wide is one piece."""
        return self.rows if self.width == self.swizzle else _ROWS

    def scratch(self, warpgroups: int, dtype: Any, alias: bool) -> Any:
        transforms = _transforms(self.swizzle, dtype)
        tiled = plgpu.SMEM((warpgroups, self.buffers, self.rows, self.width), dtype, transforms=transforms)
        if not alias:
            return tiled
        plain = (warpgroups, self.buffers, len(self.pieces), self.piece_rows, self.swizzle)
        return plgpu.RefUnion(tiled, plgpu.SMEM(plain, dtype, transforms=transforms[1:]))

    def send(self, tiled: Any, plain: Any, out: Any, row: Any, column: Any) -> None:
        """Starts the copy of one block; what lies outside of the result is dropped."""
        if plain is None:
            plgpu.copy_smem_to_gmem(tiled, out.at[pl.ds(row, self.rows), pl.ds(column, self.width)])
            return
        for index, (i, j) in enumerate(self.pieces):
            window = out.at[pl.ds(row + i, self.piece_rows), pl.ds(column + j, self.swizzle)]
            plgpu.copy_smem_to_gmem(plain.at[index], window, commit_group=index == len(self.pieces) - 1)


def ring_matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    total: jax.Array | None = None,
    schedule: MatmulSchedule,
    transpose_w: bool,
    transpose_x: bool = False,
    out_dtype: Any,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on operands that the copy engine can address.

    Args:
        x: (M, K), or a stack (B, M, K); K a multiple of 8, M and B at least 1. (K, M) with `transpose_x`, where M is a
            multiple of 16. A matrix beside a stack of `w` belongs to every entry.
        w: (K, N), or (N, K) with `transpose_w`, of the same 2-byte dtype; N a multiple of 8, and of 16 where the
            weights are (K, N). A stack too, or with `transpose_x` a matrix that belongs to every entry.
        bias: (N',) of any float dtype, N' a multiple of the schedule's `block_n` and at least N; added in float32.
        total: (M', N') or a stack of them, float32, with which the sums start; M' and N' are multiples of what a
            cluster computes and at least M and N. Without it they start at zero. Not for a schedule with `swap`.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        transpose_x: Whether `x` is stored as (K, M).
        out_dtype: Dtype of the result; rounded from the float32 accumulator once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (M, N) or (B, M, N) of `out_dtype`.
    """
    stack, n, s = max(x.shape[:-2], w.shape[:-2]), w.shape[-2 if transpose_w else -1], schedule
    m, k = x.shape[:-3:-1] if transpose_x else x.shape[-2:]
    swizzle = SWIZZLE_BYTES // x.dtype.itemsize
    if not transpose_w:
        swizzle = math.gcd(swizzle, n, s.block_n)
    if transpose_x:
        swizzle = math.gcd(swizzle, m, s.block_m)
    x_size = s.block_m if transpose_x or m > s.block_m else min(s.block_m, -(-m // _ROWS) * _ROWS)
    x_side = _Side(m, k, not transpose_x, s.block_m, x_size, swizzle, s.k_step)
    w_side = _Side(n, k, transpose_w, s.block_n, s.block_n, swizzle, s.k_step)
    rows, columns = (w_side, x_side) if s.swap else (x_side, w_side)
    row_tiles = _cdiv(rows.size, rows.tile * s.cluster_rows)
    column_tiles = _cdiv(columns.size, columns.tile * s.cluster_columns)
    tiles, cluster = math.prod(stack) * row_tiles * column_tiles, s.cluster_rows * s.cluster_columns
    k_steps = _cdiv(k, s.k_step)
    clusters = min(tiles, s.clusters) if s.clusters else tiles
    stages = min(s.stages, k_steps * _cdiv(tiles, clusters))
    store = _store(s, m, n, jnp.dtype(out_dtype))
    pieces = max(rows.pieces, columns.pieces)
    takers = s.warpgroups if s.split == "tiles" else 1  # warpgroups that take tiles in turn
    alias = [not interpret and ragged for ragged in (rows.ragged, columns.ragged, store.ragged)]
    collective = ("member",) if cluster > 1 else None

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        given = iter(refs)
        bias_ref = next(given) if bias is not None else None
        total_ref = next(given) if total is not None else None
        out_ref, *scratch = given
        (rows_ref, rows_in), (columns_ref, columns_in), (out_tiled, out_plain) = (
            ref if aliased else (ref, None) for ref, aliased in zip(scratch, alias, strict=False)
        )
        full, empty = scratch[3:]
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
            source, target = _in_stack(w_ref if s.swap else x_ref, place), rows_ref if rows_in is None else rows_in
            rows.copy(source, target, row, k, slot, ready, collective if s.cluster_columns > 1 else None)

        def copy_columns(place: Any, column: Any, k: Any, slot: Any, ready: Any) -> None:
            source = _in_stack(x_ref if s.swap else w_ref, place)
            target = columns_ref if columns_in is None else columns_in
            columns.copy(source, target, column, k, slot, ready, collective if s.cluster_rows > 1 else None)

        def produce() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                place, row, column = origin(tile)

                @pl.loop(0, k_steps)
                def _(step: Any) -> None:
                    position = tile * k_steps + step
                    slot = lax.rem(position, stages)

                    @pl.when(position >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    copy_rows(place, row, step * s.k_step, slot, full.at[arrival(tile, slot)])
                    copy_columns(place, column, step * s.k_step, slot, full.at[arrival(tile, slot)])

            # Every signal is awaited: a neighbour in the cluster may still write to this block's shared memory.
            total = count * k_steps

            @pl.loop(0, jnp.minimum(total, stages))
            def _(i: Any) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(jnp.maximum(total - stages, 0) + i, stages)])

        def consume() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(_COMPUTE_REGISTERS[s.warpgroups], action="increase")
            row_offset = warpgroup * s.tile_rows if s.split == "rows" else 0
            column_offset = warpgroup * s.tile_columns if s.split == "columns" else 0
            row_part = pl.ds(row_offset, s.tile_rows) if rows.tile > s.tile_rows else slice(None)
            column_part = pl.ds(column_offset, s.tile_columns) if columns.tile > s.tile_columns else slice(None)

            @pl.loop(0, count if takers == 1 else lax.div(count - warpgroup + takers - 1, takers))
            def _(turn: Any) -> None:
                tile = turn if takers == 1 else turn * takers + warpgroup
                place, row, column = origin(tile)

                def multiply(accumulator: Any, step: Any) -> None:
                    slot = lax.rem(tile * k_steps + step, stages)
                    plgpu.barrier_wait(full.at[arrival(tile, slot)])
                    for piece in range(pieces):
                        left = rows.operand(rows_ref, slot, piece, pieces, row_part)
                        right = columns.operand(columns_ref, slot, piece, pieces, column_part)
                        plgpu.wgmma(accumulator, left, right.transpose((1, 0)))

                def release(step: Any) -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(tile * k_steps + step, stages)])

                def previous() -> Any:
                    """Returns this warpgroup's part of the sums to continue."""
                    at = pl.ds(row + row_offset, s.tile_rows), pl.ds(column + column_offset, s.tile_columns)
                    return plgpu.load(_in_stack(total_ref, place).at[at], layout=plgpu.Layout.WGMMA, optimized=False)

                def accumulate(accumulator: Any) -> None:
                    if total_ref is not None and not interpret:
                        accumulator[...] = previous()
                    multiply(accumulator, 0)

                    @pl.loop(1, k_steps)
                    def _(step: Any) -> None:
                        multiply(accumulator, step)
                        plgpu.wgmma_wait(pieces)  # the products of the step before are done, this one's go on
                        release(step - 1)

                    plgpu.wgmma_wait(0)
                    release(k_steps - 1)
                    result, at_row, at_column = accumulator[...], row + row_offset, column + column_offset
                    if total_ref is not None and interpret:
                        result += previous()  # the interpreter cannot store to an accumulator: another order
                    if bias_ref is not None:
                        result += _broadcast_bias(bias_ref, at_row if s.swap else at_column, result.shape, s.swap)
                    plain = None if out_plain is None else out_plain.at[warpgroup]
                    if s.swap:
                        at_row, at_column = at_column, at_row
                    tiled, out = out_tiled.at[warpgroup], _in_stack(out_ref, place)
                    _put(store, result.astype(out_dtype), s.swap, tiled, plain, out, at_row, at_column)

                pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((s.tile_rows, s.tile_columns), jnp.float32))

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
            plgpu.Barrier(num_arrivals=rows.pieces + columns.pieces, num_barriers=stages * takers),
            barrier(num_arrivals=s.warpgroups // takers, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    result: jax.Array = launch(x, w, *(a for a in (bias, total) if a is not None))
    return result


def _in_stack(ref: Any, place: Any) -> Any:
    """Returns the entry of a stack, or the matrix that stands for every entry."""
    return ref if len(ref.shape) == 2 else ref.at[place]


def _broadcast_bias(bias: Any, start: Any, shape: tuple[int, int], swap: bool) -> Any:
    """Returns a warpgroup's part of the bias in float32, along wgmma's rows with `swap`, else along its columns."""
    axis = 0 if swap else 1
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    part = plgpu.load(bias.at[pl.ds(start, shape[axis])], layout=layout, optimized=False)
    return lax.broadcast_in_dim(part.astype(jnp.float32), shape, (axis,))


def _store(s: MatmulSchedule, m: int, n: int, dtype: Any) -> _Store:
    """Returns how the result leaves the kernel."""
    (rows, width, buffers), swizzle = s.out_blocks(dtype.itemsize), SWIZZLE_BYTES // dtype.itemsize
    if s.swap:
        return _Store(rows, width, swizzle, (m % _ROWS != 0 and m > _ROWS) or n % swizzle != 0, buffers)
    return _Store(rows, width, width, m % _ROWS != 0 or n % width != 0, buffers)


def _put(store: _Store, result: Any, swap: bool, tiled: Any, plain: Any, out: Any, row: Any, column: Any) -> None:
    """Writes a warpgroup's part of the result from (row, column) on, transposed with `swap`, block by block."""
    if swap:
        result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    m, n = reversed(result.shape) if swap else result.shape
    blocks = [(i, j) for i in range(0, m, store.rows) for j in range(0, n, store.width)]

    def write(index: int, i: int, j: int) -> None:
        block = slice(i, i + store.rows), slice(j, j + store.width)
        target = tiled.at[index % store.buffers]
        if swap:
            target.transpose((1, 0))[...] = result if len(blocks) == 1 else result[block[::-1]]
        else:
            target[...] = result[block]

    def send(index: int, i: int, j: int) -> None:
        slot = index % store.buffers
        store.send(tiled.at[slot], None if plain is None else plain.at[slot], out, row + i, column + j)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before, every block has left its buffer
    if len(blocks) <= store.buffers:
        for index, block in enumerate(blocks):
            write(index, *block)
        plgpu.commit_smem()
        for index, block in enumerate(blocks):
            send(index, *block)
        return
    for index, block in enumerate(blocks):
        if index >= store.buffers:
            plgpu.wait_smem_to_gmem(store.buffers - 1, wait_read_only=True)
        write(index, *block)
        plgpu.commit_smem()
        send(index, *block)


def _tile_position(index: Any, row_tiles: int, column_tiles: int, group: int) -> tuple[Any, Any]:
    """Walks the tiles in bands of `group` rows, so that blocks that run together share operands in the L2 cache."""
    band = lax.div(index, group * column_tiles)
    inside = lax.rem(index, group * column_tiles)
    height = jnp.minimum(row_tiles - band * group, group)
    return band * group + lax.rem(inside, height), lax.div(inside, height)


def _transforms(swizzle: int, dtype: Any) -> tuple[Any, Any]:
    tiling: Any = plgpu.TilingTransform  # typed as abstract classes in JAX 0.12
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((_ROWS, swizzle)), swizzling(swizzle * jnp.dtype(dtype).itemsize)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
