"""Transposes a tile of 4-byte elements in place in shared memory, with the 128 threads of a warpgroup."""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.tile import i32

SQUARE: Final = 32
"""Rows and columns of the squares that a tile is made of: the 4-byte elements of a swizzled row."""

_SIDE: Final = 4  # of the blocks that a thread transposes in registers
_ROW_BYTES: Final = 128
_TILE_BYTES: Final = 8 * _ROW_BYTES  # 8 swizzled rows
_THREADS: Final = 128


def transpose_tile(tile: Any, k: int, n: int, transforms: Any) -> None:
    """Transposes a (k, n) tile into an (n, k) tile in the same bytes.

    A thread reads blocks of 4 by 4 elements as four rows of 16 bytes and writes them as four columns. Eight
    neighbouring threads take a diagonal of a square's 8 by 8 blocks: with the swizzle, both their rows and their
    columns cover all 32 banks. All reads precede all writes.

    Args:
        tile: (k, n) of float32 in shared memory, in (8, 32) tiles, swizzled over 128 bytes.
        k: Rows, a multiple of 32; k n is a multiple of 2048.
        n: Columns, a multiple of 32.
        transforms: Transforms of `tile`.
    """

    @inline(plgpu.RefType(transforms))
    def body(ref: Any) -> None:
        base = utils.memref_ptr(ref)
        elements = ir.VectorType.get((_SIDE,), ir.F32Type.get())
        thread = arith.andi(mgpu.thread_idx(), i32(_THREADS - 1))
        row = arith.andi(thread, i32(7))  # of the thread's block in its square
        column = arith.xori(row, arith.andi(arith.shrui(thread, i32(3)), i32(7)))
        half = arith.shrui(thread, i32(6))  # index of two squares
        source, target = _block(row, column, n // SQUARE), _block(column, row, k // SQUARE)
        blocks = []
        for place in _squares(k, n, half):
            start = arith.addi(source[0], _square(*place, n // SQUARE))
            blocks.append([_load(elements, base, start, offset) for offset in source[1]])
        mgpu.warpgroup_barrier()
        for (down, right), rows in zip(_squares(k, n, half), blocks, strict=True):
            start = arith.addi(target[0], _square(right, down, k // SQUARE))
            for i, offset in enumerate(target[1]):
                part = llvm.mlir_undef(elements)
                for j, row_of_block in enumerate(rows):
                    value = vector.extract(row_of_block, dynamic_position=[], static_position=[i])
                    part = llvm.insertelement(part, value, i32(j))
                llvm.store(part, _pointer(base, start, offset))

    body(tile)


def _squares(k: int, n: int, half: Any) -> list[tuple[Any, Any]]:
    """Returns the positions (down, right) of the squares of one half of the threads."""
    downs, rights = k // SQUARE, n // SQUARE
    if rights % 2 == 0:
        return [(i32(d), arith.addi(half, i32(r))) for d in range(downs) for r in range(0, rights, 2)]
    return [(arith.addi(half, i32(d)), i32(r)) for d in range(0, downs, 2) for r in range(rights)]


def _square(down: Any, right: Any, squares: int) -> Any:
    """Returns the byte offset of a square in a tile that is `squares` squares wide."""
    rows = arith.muli(down, i32(SQUARE // 8 * squares * _TILE_BYTES))
    return arith.addi(rows, arith.muli(right, i32(_TILE_BYTES)))


def _block(row: Any, column: Any, squares: int) -> tuple[Any, list[Any]]:
    """Returns the byte offset of block (row, column) of a square, and the relative offsets of its rows."""
    odd = arith.andi(row, i32(1))
    start = arith.addi(
        arith.muli(arith.shrui(row, i32(1)), i32(squares * _TILE_BYTES)),
        arith.muli(odd, i32(_SIDE * _ROW_BYTES)),
    )
    chunk = arith.xori(column, arith.muli(odd, i32(_SIDE)))
    rows = [
        arith.addi(i32(i * _ROW_BYTES), arith.muli(arith.xori(chunk, i32(i)), i32(4 * _SIDE))) for i in range(_SIDE)
    ]
    return start, rows


def _load(elements: Any, base: Any, start: Any, offset: Any) -> Any:
    return llvm.load(elements, _pointer(base, start, offset))


def _pointer(base: Any, start: Any, offset: Any) -> Any:
    return utils.getelementptr(base, [arith.addi(start, offset)], ir.IntegerType.get_signless(8))
