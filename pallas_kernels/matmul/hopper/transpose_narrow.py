"""Transposes a tile of 8 or 16 columns of 4-byte elements in shared memory, with the 128 threads of a warpgroup."""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_SIDE: Final = 4  # of the block that a thread transposes in registers
_CHUNK: Final = 16  # bytes of a side: the unit of a swizzle
_ROW_BYTES: Final = 128  # of a swizzled row of the transposed tile
_THREADS: Final = 128


def transpose_narrow_tile(tile: Any, transposed: Any, k: int, n: int, transforms: tuple[Any, Any]) -> None:
    """Transposes a (k, n) tile into an (n, k) tile.

    A thread reads blocks of 4 by 4 elements as four rows of 16 bytes and writes them as four columns. Rows of one
    number in their blocks lie in a half or a quarter of the banks, so neighbouring threads read the rows of their
    blocks in different orders. Eight of them, two blocks across and four down, cover all banks with each access.

    Args:
        tile: (k, n) of float32 in shared memory, in (8, n) tiles, swizzled over the 4 n bytes of a row.
        transposed: (n, k), in (8, 32) tiles, swizzled over 128 bytes.
        k: Rows, a multiple of 32.
        n: Columns, 8 or 16.
        transforms: Transforms of `tile` and of `transposed`.
    """

    @inline(*(plgpu.RefType(one) for one in transforms))
    def body(tile: Any, transposed: Any) -> None:
        thread, blocks = thread_of_warpgroup(), k * n // _SIDE**2
        places = [_place(arith.addi(thread, i32(first)), n) for first in range(0, blocks - blocks % _THREADS, _THREADS)]
        _transpose(tile, transposed, places, k, n)
        if left := blocks % _THREADS:
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, i32(left))):
                _transpose(tile, transposed, [_place(arith.addi(thread, i32(blocks - left)), n)], k, n)

    body(tile, transposed)


def _place(number: Any, n: int) -> tuple[Any, Any]:
    """Returns the position (down, across) of a block."""
    across, down = arith.andi(number, i32(1)), arith.andi(arith.shrui(number, i32(1)), i32(3))
    rest = arith.shrui(number, i32(3))
    if n == 16:
        across = arith.addi(across, arith.muli(arith.andi(rest, i32(1)), i32(2)))
        rest = arith.shrui(rest, i32(1))
    return arith.addi(down, arith.muli(rest, i32(4))), across


def _transpose(tile: Any, transposed: Any, places: list[tuple[Any, Any]], k: int, n: int) -> None:
    """Transposes blocks; all their reads are issued first."""
    source, target = utils.memref_ptr(tile), utils.memref_ptr(transposed)
    blocks = [_read(source, down, across, n) for down, across in places]
    for (down, across), rows in zip(places, blocks, strict=True):
        half, chunk = arith.andi(across, i32(1)), arith.andi(down, i32(7))
        start = arith.addi(
            arith.muli(arith.shrui(across, i32(1)), i32(k * 8 * 4)),
            arith.muli(arith.shrui(down, i32(3)), i32(8 * _ROW_BYTES)),
        )
        for column in range(_SIDE):
            row = arith.addi(arith.muli(half, i32(_SIDE)), i32(column))
            offset = arith.addi(
                arith.addi(start, arith.muli(row, i32(_ROW_BYTES))),
                arith.muli(arith.xori(chunk, row), i32(_CHUNK)),
            )
            part = llvm.mlir_undef(_four())
            for i, held in enumerate(rows):
                value = vector.extract(held, dynamic_position=[], static_position=[column])
                part = llvm.insertelement(part, value, i32(i))
            llvm.store(part, _pointer(target, offset))


def _read(base: Any, down: Any, across: Any, n: int) -> list[Any]:
    """Returns the four rows of a block."""
    order = arith.andi(down, i32(3)) if n == 8 else arith.andi(arith.shrui(down, i32(1)), i32(1))
    rows = []
    for i in range(_SIDE):
        row = arith.addi(arith.muli(down, i32(_SIDE)), arith.xori(order, i32(i)))
        # The bits of the address above the 128 bytes of all banks change the place in a row.
        turn = arith.andi(arith.shrui(row, i32(2 if n == 8 else 1)), i32(n // _SIDE - 1))
        offset = arith.addi(arith.muli(row, i32(4 * n)), arith.muli(arith.xori(across, turn), i32(_CHUNK)))
        rows.append(llvm.load(_four(), _pointer(base, offset)))
    for bit in (1, 2) if n == 8 else (1,):
        other = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(order, i32(bit)), i32(0))
        rows = [arith.select(other, rows[i ^ bit], rows[i]) for i in range(_SIDE)]
    return rows


def _four() -> Any:
    return ir.VectorType.get((_SIDE,), ir.F32Type.get())


def _pointer(base: Any, offset: Any) -> Any:
    return utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))
