"""The epilogue of the Hopper matmul, from the accumulated tile to the result in memory.

The order is fixed: `activation(tile + bias) + residual`, or for a pair of products `activation(gate) * up`, every step
in float32, rounded once to the result's dtype, for every schedule. Integer sums are first multiplied by the row scale,
then by the column scale. A product is followed by a sum only in an activation and after the scales, whose instructions
are fixed (`pallas_kernels.matmul.hopper.activation`, `parts.hopper.tile.Arithmetic`): so none is contracted.
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

from pallas_kernels.matmul.hopper.activation import activate_tile
from pallas_kernels.matmul.hopper.group_tiles import send_rows
from pallas_kernels.matmul.hopper.operand import ROWS, SWIZZLE_BYTES, in_stack, tile_transforms
from pallas_kernels.parts.hopper.tile import Arithmetic, along
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["scales", "up", "bias", "residual"], meta_fields=["activation"]
)
@dataclass(frozen=True)
class Epilogue:
    """The operations on the float32 product before it is rounded: activation(product + bias) + residual.

    Inside a kernel the arrays are references.

    Attributes:
        bias: (N',) of any float dtype, N' a multiple of the schedule's `block_n` and at least N.
        activation: A name that `pallas_kernels.matmul.activations.activate` takes.
        residual: An array with the shape and dtype of the result.
        up: Weights of a second product of the same rows, stored like the first: activation(first) * second. Without a
            bias.
        scales: For integer sums: row scales, (M,) float32, and column scales, (N,) of any float dtype, or (B, N) for a
            stack of weights.
    """

    bias: jax.Array | None = None
    activation: str | None = None
    residual: jax.Array | None = None
    up: jax.Array | None = None
    scales: tuple[jax.Array, jax.Array] | None = None

    @property
    def gated(self) -> bool:
        """Whether there are two products."""
        return self.up is not None

    def map(self, change: Callable[[jax.Array], jax.Array]) -> "Epilogue":
        """Returns the epilogue with its arrays mapped."""
        arrays = (None if a is None else change(a) for a in (self.bias, self.residual, self.up))
        bias, residual, up = arrays
        return replace(self, bias=bias, residual=residual, up=up)

    def of_rows(self, first: int, count: int) -> "Epilogue":
        """Returns the epilogue of a range of rows."""
        return self if self.residual is None else replace(self, residual=self.residual[first : first + count])

    def padded(self, columns: int) -> "Epilogue":
        """Returns the epilogue with the bias padded to whole tiles of `columns`."""
        if self.bias is None or self.bias.shape[0] % columns == 0:
            return self
        return replace(self, bias=jnp.pad(self.bias, (0, -self.bias.shape[0] % columns)))

    def before_residual(self, tiles: tuple[Any, ...], bias: Any, layout: Any, interpret: Any) -> Any:
        """Returns the finished tile, without the residual.

        Args:
            tiles: float32 tile of the product, or of both products.
            bias: Slice of the bias, with the shape of a tile, or None.
            layout: Layout of a tile.
            interpret: Whether the kernel runs in the interpreter.
        """
        first, *second = tiles
        if bias is not None:
            first += bias
        first = activate_tile(first, self.activation, layout, interpret)
        return first * second[0] if second else first


@dataclass(frozen=True)
class Store:
    """How one warpgroup stores its part of the result, a (rows, width) block at a time.

    Attributes:
        rows: Rows of the result in a block.
        width: Columns of the result in a block.
        swizzle: Elements of a swizzled row.
        ragged: Whether a block is stored as unswizzled rows: the result does not divide into whole (8, swizzle) tiles,
            or is one tile wide (see `make_store`).
        buffers: Blocks whose stores can be in flight.
        fetches: Whether a residual is fetched into the buffers.
    """

    rows: int
    width: int
    swizzle: int
    ragged: bool
    buffers: int
    fetches: bool = False

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First row and column of the pieces of a block that are plain rows in memory order."""
        return [(i, j) for i in range(0, self.rows, self.piece_rows) for j in range(0, self.width, self.swizzle)]

    @property
    def piece_rows(self) -> int:
        """Rows of such a piece; a block one swizzled row wide is one piece."""
        return self.rows if self.width == self.swizzle else ROWS

    def scratch(self, warpgroups: int, dtype: Any, alias: bool, sums: Any = None) -> Any:
        """Shared memory of the blocks; with `alias` also viewed as plain rows, for copies in pieces.

        With the type of shared memory for `sums`, for which `holds` has to be true, also viewed as that.
        """
        transforms = tile_transforms(self.swizzle, dtype)
        buffers = self.buffers
        if sums is not None:  # as many bytes for each warpgroup in every view
            buffers = math.prod(sums.shape[1:]) * sums.dtype.itemsize // self.bytes(dtype)
        views = [plgpu.SMEM((warpgroups, buffers, self.rows, self.width), dtype, transforms=transforms)]
        if alias:
            plain = (warpgroups, buffers, len(self.pieces), self.piece_rows, self.swizzle)
            views.append(plgpu.SMEM(plain, dtype, transforms=transforms[1:]))
        views += [] if sums is None else [sums]
        return plgpu.RefUnion(*views) if len(views) > 1 else views[0]

    def bytes(self, dtype: Any) -> int:
        """Returns the bytes of a block."""
        return self.rows * self.width * jnp.dtype(dtype).itemsize

    def holds(self, size: int, dtype: Any) -> bool:
        """Returns whether `size` bytes of a warpgroup are whole blocks, and at least its buffers."""
        return size % self.bytes(dtype) == 0 and size >= self.buffers * self.bytes(dtype)

    def barrier(self, warpgroups: int, alias: bool) -> Any:
        """Barriers that a warpgroup's whole residual has arrived."""
        copies = self.buffers * (len(self.pieces) if alias else 1)
        return plgpu.Barrier(num_arrivals=copies, num_barriers=warpgroups)

    def send(self, tiled: Any, plain: Any, out: Any, row: Any, column: Any) -> None:
        """Starts the copy of one block to memory; elements outside the result are dropped."""
        windows = self._windows(tiled, plain, out, row, column)
        for index, (block, window) in enumerate(windows):
            plgpu.copy_smem_to_gmem(block, window, commit_group=index == len(windows) - 1)

    def send_valid(self, tiled: Any, plain: Any, out: Any, row: Any, column: Any, valid: Any) -> None:
        """The same for the first `valid` rows of the block; `valid` may exceed the block's rows or be negative."""

        @pl.when(valid >= self.rows)
        def _() -> None:
            for block, window in self._windows(tiled, plain, out, row, column):
                plgpu.copy_smem_to_gmem(block, window, commit_group=False)

        @pl.when((valid > 0) & (valid < self.rows))
        def _() -> None:
            pieces = [(tiled, 0, 0)]
            if plain is not None:
                pieces = [(plain.at[index], i, j) for index, (i, j) in enumerate(self.pieces)]
            send_rows(pieces, out, row, column, valid)

        plgpu.commit_smem_to_gmem_group()

    def fetch(self, tiled: Any, plain: Any, source: Any, row: Any, column: Any, barrier: Any) -> None:
        """Starts the copy of one block from memory; elements outside are zero-filled."""
        for block, window in self._windows(tiled, plain, source, row, column):
            plgpu.copy_gmem_to_smem(window, block, barrier)

    def _windows(self, tiled: Any, plain: Any, whole: Any, row: Any, column: Any) -> list[tuple[Any, Any]]:
        if plain is None:
            return [(tiled, whole.at[pl.ds(row, self.rows), pl.ds(column, self.width)])]
        return [
            (plain.at[index], whole.at[pl.ds(row + i, self.piece_rows), pl.ds(column + j, self.swizzle)])
            for index, (i, j) in enumerate(self.pieces)
        ]


def make_store(
    s: MatmulSchedule,
    shape: tuple[int, int],
    m: int,
    n: int,
    dtype: Any,
    epilogue: Epilogue,
    *,
    in_groups: bool = False,
    fetches: bool = False,
) -> Store:
    """Returns how warpgroups with accumulators of `shape` store an (M, N) result of `dtype`.

    If both the result and a block have one tile along a dimension, Mosaic GPU drops that tile dimension and its index
    from the copy: a block outside the result would overwrite the one inside. Such blocks are stored as plain rows,
    which keep every index.

    If a residual is fetched into the buffers while the products are summed, every block of the tile has its own. With
    rows in groups, a block may store only its first rows, which are stored as plain rows.
    """
    covered_m, covered_n = s.block_m, s.block_n // (2 if epilogue.gated else 1)
    s = replace(s, tile_rows=shape[0], tile_columns=shape[1])
    (rows, width, buffers), swizzle = s.out_blocks(dtype.itemsize), SWIZZLE_BYTES // dtype.itemsize
    if fetches:
        buffers = shape[0] * shape[1] // (rows * width)
    if s.swap:
        ragged = (m % ROWS != 0 and m > ROWS) or n % swizzle != 0
    else:
        swizzle, ragged = width, m % ROWS != 0 or n % width != 0
    outside = (m <= ROWS == rows < covered_m) or (n <= swizzle == width < covered_n)
    return Store(rows, width, swizzle, ragged or outside or in_groups, buffers, fetches)


@dataclass(frozen=True)
class Ending:
    """The epilogue and the store of one warpgroup, bound to references inside the kernel.

    Attributes:
        epilogue: The epilogue, with references.
        store: How the tile is stored.
        swap: Whether the weights are the rows of the tile.
        out: The result.
        tiled: Buffers of the store.
        plain: The same as plain rows, or None.
        fetched: Barrier of the residual's blocks, or None.
        interpret: Whether the kernel runs in the interpreter.
    """

    epilogue: Epilogue
    store: Store
    swap: bool
    out: Any
    tiled: Any
    plain: Any
    fetched: Any = None
    interpret: Any = False

    def begin(self, place: Any, row: Any, column: Any, shape: tuple[int, int]) -> None:
        """Starts to fetch the residual of the tile of `shape` at wgmma's `row` and `column`."""
        if not self.store.fetches:
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # every block of the previous tile has left its buffer
        source = in_stack(self.epilogue.residual, place)
        if self.swap:
            row, column = column, row
        for slot, (i, j) in enumerate(self._blocks(shape)):
            self.store.fetch(*self._buffer(slot), source, row + i, column + j, self.fetched)

    def finish(
        self,
        tiles: tuple[Any, ...],
        place: Any,
        row: Any,
        column: Any,
        valid: Any = None,
        residual: Callable[[int, int], Any] | None = None,
    ) -> None:
        """Finishes the float32 tiles at wgmma's `row` and `column`, and starts their stores.

        Args:
            tiles: The tiles.
            place: Entry of the stack.
            row: First row.
            column: First column.
            valid: Number of rows of the result to store; None for all.
            residual: Shared memory of the residual of the block at a row and a column of the tile, if it is not in the
                buffers.
        """
        if self.epilogue.scales is not None:
            tiles = (self._rescaled(tiles[0], self.epilogue.scales, place, row, column),)
        bias = None
        if self.epilogue.bias is not None:
            bias = _broadcast_bias(self.epilogue.bias, row if self.swap else column, tiles[0].shape, self.swap)
        tile = self.epilogue.before_residual(tiles, bias, plgpu.Layout.WGMMA, self.interpret)
        if self.store.fetches:
            plgpu.barrier_wait(self.fetched)
        elif residual is None:
            tile = tile.astype(self.out.dtype)
        if self.swap:
            row, column = column, row
            tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
        self._put(tile, in_stack(self.out, place), row, column, valid, residual)

    def _rescaled(self, tile: Any, scales: tuple[Any, Any], place: Any, row: Any, column: Any) -> Any:
        """Returns an integer tile multiplied by its row scales, then by its column scales."""
        arithmetic = Arithmetic(interpret=bool(self.interpret))
        rows, columns = scales
        columns = columns if len(columns.shape) == 1 else columns.at[place]
        of_rows, of_columns = (
            ((rows, column, 1), (columns, row, 0)) if self.swap else ((rows, row, 0), (columns, column, 1))
        )
        tile = tile.astype(jnp.float32)
        for numbers, start, axis in (of_rows, of_columns):
            tile = arithmetic.product(tile, along(numbers, start, tile.shape, axis, self.interpret))
        return tile

    def fill(self, tile: Any, row: Any, column: Any) -> None:
        """Stores a float32 tile of a matrix without an epilogue at wgmma's `row` and `column`."""
        tile = tile.astype(self.out.dtype)
        if self.swap:
            row, column = column, row
            tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
        self._put(tile, self.out, row, column, None)

    def _put(
        self,
        tile: Any,
        out: Any,
        row: Any,
        column: Any,
        valid: Any,
        residual: Callable[[int, int], Any] | None = None,
    ) -> None:
        """Writes a tile at (row, column) of the result, transposed with `swap`, block by block."""
        store, blocks = self.store, self._blocks(tile.shape)

        def send(index: int, i: int, j: int) -> None:
            buffer = self._buffer(index % store.buffers)
            if valid is None:
                store.send(*buffer, out, row + i, column + j)
            else:
                store.send_valid(*buffer, out, row + i, column + j, valid - i)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # every block of the previous tile has left its buffer
        if len(blocks) <= store.buffers:
            for index, block in enumerate(blocks):
                self._write(tile, index, *block, residual)
            plgpu.commit_smem()
            for index, block in enumerate(blocks):
                send(index, *block)
            return
        for index, block in enumerate(blocks):
            if index >= store.buffers:
                plgpu.wait_smem_to_gmem(store.buffers - 1, wait_read_only=True)
            self._write(tile, index, *block, residual)
            plgpu.commit_smem()
            send(index, *block)

    def _write(self, tile: Any, index: int, i: int, j: int, residual: Callable[[int, int], Any] | None = None) -> None:
        """Writes a block into its buffer, added to its residual in shared memory."""
        block = slice(i, i + self.store.rows), slice(j, j + self.store.width)
        buffer = self._buffer(index % self.store.buffers)[0]
        layout = plgpu.Layout.WGMMA
        if self.swap:
            block, buffer, layout = block[::-1], buffer.transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED
        part = tile if tile.shape == buffer.shape else tile[block]
        if self.store.fetches or residual is not None:
            source = buffer if residual is None else residual(i, j)
            part = (part + plgpu.load(source, layout=layout).astype(jnp.float32)).astype(buffer.dtype)
        buffer[...] = part

    def _blocks(self, shape: tuple[int, int]) -> list[tuple[int, int]]:
        """Returns where the blocks of an accumulated tile of `shape` start in the stored tile."""
        rows, columns = shape[::-1] if self.swap else shape
        return [(i, j) for i in range(0, rows, self.store.rows) for j in range(0, columns, self.store.width)]

    def _buffer(self, slot: int) -> tuple[Any, Any]:
        return self.tiled.at[slot], None if self.plain is None else self.plain.at[slot]


def add_tiles(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds the sums of two K splits."""
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _broadcast_bias(bias: Any, start: Any, shape: tuple[int, int], swap: bool) -> Any:
    """Returns a warpgroup's part of the bias in float32, along wgmma's rows with `swap`, else along its columns."""
    axis = 0 if swap else 1
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    part = plgpu.load(bias.at[pl.ds(start, shape[axis])], layout=layout, optimized=False)
    return lax.broadcast_in_dim(part.astype(jnp.float32), shape, (axis,))
