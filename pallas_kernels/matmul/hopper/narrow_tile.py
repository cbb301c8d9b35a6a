"""The ends of a tile of 8 to 64 columns of weights whose products `wgmma_rows` adds: bias and result.

Other rows of the tile than those of the columns are meaningless.
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.inline import held, inline
from pallas_kernels.parts.hopper.products import accumulated, accumulator
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_SQUARE: Final = 32  # elements of 4 bytes in a swizzled row
_ROWS: Final = 64  # of wgmma


@dataclass(frozen=True)
class Columns:
    """Which columns of weights threads have as wgmma's rows.

    Attributes:
        n: Columns of the tile.
        dealt: Whether columns are in the order in which threads read all banks at once, as for (K, N) weights of 4
            bytes an element.
    """

    n: int
    dealt: bool = False

    @property
    def of_warp(self) -> int:
        """Number of columns of a warp that has any."""
        return 16 if self.n == _ROWS else 8


def column_of(half: int, columns: Columns) -> Any:
    """Returns the column that a thread has in its upper (0) or lower (1) row of wgmma's rows; at least `n` for none.

    Args:
        half: Which row: the number of a thread in its warp over 4, or 8 more, which has a column if a warp has 16.
        columns: The columns of the tile.
    """
    n, each, dealt = columns.n, columns.of_warp, columns.dealt
    thread = thread_of_warpgroup()
    warp, g = arith.shrui(thread, i32(5)), arith.andi(arith.shrui(thread, i32(2)), i32(7))
    square = min(n, _SQUARE) if dealt else n
    warps = square // each  # that read a square
    inside = arith.remui(warp, i32(warps))
    if not dealt or n == 8:
        column = arith.addi(arith.muli(inside, i32(each)), arith.addi(g, i32(8 * half)))
    else:
        chunk = arith.addi(arith.muli(inside, i32(each // 8)), i32(half))
        chunk = arith.addi(chunk, arith.muli(arith.shrui(g, i32(2)), i32(square // 8)))
        column = arith.addi(arith.muli(chunk, i32(4)), arith.andi(g, i32(3)))
    return arith.addi(column, arith.muli(arith.divui(warp, i32(warps)), i32(square)))


def bias_of(bias: Any, column: Any, rows: int, columns: Columns, interpret: Any) -> jax.Array:
    """Returns the bias of a tile, (64, rows) in float32.

    Args:
        bias: (N',) of any float dtype in GPU memory, N' a multiple of `n`.
        column: First column.
        rows: Rows of the activations in a tile.
        columns: Columns of the weights in a tile.
        interpret: Whether the kernel runs in the interpreter.
    """
    n = columns.n
    if interpret:
        found = jnp.pad(bias.at[pl.ds(column, n)][...].astype(jnp.float32), (0, _ROWS - n))
        return jnp.broadcast_to(found[:, None], (_ROWS, rows))

    @inline(plgpu.RefType(()), plgpu.Layout.WG_SPLAT(()), result=held((_ROWS, rows), plgpu.Layout.WGMMA))
    def load(ref: Any, column: Any) -> Any:
        kind, number, numbers = ir.MemRefType(ref.type).element_type, ir.F32Type.get(), []
        for half in (0, 1) if columns.of_warp == 16 else (0, 0):
            at = arith.addi(arith.andi(column_of(half, columns), i32(n - 1)), column.registers.item())
            found = llvm.load(kind, utils.getelementptr(utils.memref_ptr(ref), [at], kind))
            numbers.append(found if kind == number else arith.extf(number, found))
        return accumulator([numbers[i // 2 % 2] for i in range(rows // 2)], rows)

    return load(bias, jnp.asarray(column, jnp.int32))


def store(tile: jax.Array, out: Any, row: Any, column: Any, columns: Columns, interpret: Any) -> None:
    """Writes a tile, transposed and rounded, to GPU memory; what is outside the result is left out.

    Args:
        tile: (64, rows), float32.
        out: The result (M, N).
        row: First row of the result.
        column: First column.
        columns: Columns of the weights in a tile.
        interpret: Whether the kernel runs in the interpreter.
    """
    (most, whole), rows, n = out.shape, tile.shape[1], columns.n
    if interpret:
        for height in {rows, most % rows or rows}:
            for width in {n, whole % n or n}:

                @pl.when((jnp.minimum(most - row, rows) == height) & (jnp.minimum(whole - column, n) == width))
                def _(height: int = height, width: int = width) -> None:
                    part = tile.T[:height, :width].astype(out.dtype)
                    out.at[pl.ds(row, height), pl.ds(column, width)][...] = part

        return

    @inline(plgpu.Layout.WGMMA, plgpu.RefType(()), *[plgpu.Layout.WG_SPLAT(())] * 2)
    def write(sums: Any, ref: Any, row: Any, column: Any) -> None:
        kind = ir.MemRefType(ref.type).element_type
        row, column = (a.registers.item() for a in (row, column))
        base, numbers = utils.memref_ptr(ref), accumulated(sums)
        first = arith.addi(row, arith.muli(arith.andi(thread_of_warpgroup(), i32(3)), i32(2)))
        for half in (0, 1) if columns.of_warp == 16 else (0,):
            at = column_of(half, columns)
            inside = arith.cmpi(arith.CmpIPredicate.ult, at, i32(n))
            at = arith.addi(at, column)
            inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, at, i32(whole)))
            for j in range(len(numbers) // 4):
                for i in (0, 1):
                    line = arith.addi(first, i32(8 * j + i))
                    number = numbers[4 * j + 2 * half + i]
                    if kind != ir.F32Type.get():
                        number = arith.truncf(kind, number)
                    with mgpu.when(arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, line, i32(most)))):
                        place = arith.addi(arith.muli(line, i32(whole)), at)
                        llvm.store(number, utils.getelementptr(base, [place], kind))

    write(tile, out, *(jnp.asarray(a, jnp.int32) for a in (row, column)))
