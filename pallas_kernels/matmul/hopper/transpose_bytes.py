"""Transposes a tile of bytes in place in shared memory, with the 128 threads of a warpgroup.

wgmma reads 1-byte operands along K only. `ldmatrix` transposes 8 by 8 byte pairs while loading them into registers;
`prmt` then separates the bytes of the pairs, four bytes at a time.
"""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_ROW_BYTES: Final = 128  # of a swizzled row of the transposed tile
_CHUNK: Final = 16  # bytes of a swizzle unit and of an `ldmatrix` row
_BLOCK: Final = 32  # rows that a warp reads at once


def transpose_bytes(tile: Any, transposed_w: Any, k: int, n: int, swizzle: int, transforms: tuple[Any, Any]) -> None:
    """Transposes a (k, n) tile of bytes into an (n, k) tile in the same memory.

    Neither the reads nor the writes of a warp have bank conflicts. All reads precede all writes.

    Args:
        tile: (k, n) of int8 in shared memory, in (8, swizzle) tiles, swizzled.
        transposed_w: The same memory as (n, k), in (8, 128) tiles, swizzled over 128 bytes.
        k: Rows, a multiple of 128.
        n: Columns, a multiple of 16.
        swizzle: Bytes of a swizzled row of `tile`: 32, 64 or 128.
        transforms: Transforms of `tile` and of `transposed_w`.
    """
    refs = tuple(plgpu.RefType(one) for one in transforms)

    @inline(*refs)
    def turn(tile: Any, transposed_w: Any) -> None:
        thread = thread_of_warpgroup()
        warp, lane = arith.shrui(thread, i32(5)), arith.andi(thread, i32(31))
        read = _read(tile, warp, lane, k, n, swizzle)
        mgpu.warpgroup_barrier()
        _write(transposed_w, warp, lane, k, read)

    turn(tile, transposed_w)


def _read(tile: Any, warp: Any, lane: Any, k: int, n: int, swizzle: int) -> dict[tuple[int, int], list[Any]]:
    """Reads 32 rows by 16 columns at a time; a warp takes every fourth block of 32 rows.

    A lane provides the address of one row of 16 bytes. Of each 16 rows the first of two matrices takes rows 0, 1, 4, 5,
    10, 11, 14 and 15, the second the others: eight different positions in a swizzled tile of 8 rows.
    """
    chunks, across = swizzle // _CHUNK, n // swizzle
    matrix, row = arith.shrui(lane, i32(3)), arith.andi(lane, i32(7))
    other = arith.xori(arith.andi(matrix, i32(1)), arith.shrui(row, i32(2)))
    offset = _sum(_times(arith.shrui(row, i32(1)), 4), arith.andi(row, i32(1)), _times(other, 2))
    down = _sum(_times(arith.shrui(matrix, i32(1)), 16), offset)  # of 32
    inside = arith.andi(down, i32(7))
    moved = arith.andi(arith.shrui(_times(inside, swizzle), i32(7)), i32(chunks - 1))
    start = _sum(
        _address(tile),
        _times(arith.shrui(down, i32(3)), across * 8 * swizzle),
        _times(inside, swizzle),
        _times(warp, _BLOCK * n),
    )
    places = [_sum(start, _times(arith.xori(moved, i32(chunk)), _CHUNK)) for chunk in range(chunks)]
    return {
        (square, column): _load(
            _sum(places[column % chunks], i32(square * _ROW_BYTES * n + column // chunks * 8 * swizzle))
        )
        for square in range(k // _ROW_BYTES)
        for column in range(n // _CHUNK)
    }


def _write(transposed_w: Any, warp: Any, lane: Any, k: int, read: dict[tuple[int, int], list[Any]]) -> None:
    """Writes four bytes along K at a time for two neighbouring columns; upper lanes start with the odd one."""
    pair, quad = arith.shrui(lane, i32(2)), arith.andi(lane, i32(3))
    upper = arith.shrui(pair, i32(2))
    # The matrix that has the first two of four rows: see `_read`.
    second_first = arith.cmpi(arith.CmpIPredicate.uge, quad, i32(2))
    even = arith.select(second_first, i32(0x2064), i32(0x6420))
    odd = arith.select(second_first, i32(0x3175), i32(0x7531))
    is_upper = arith.cmpi(arith.CmpIPredicate.ne, upper, i32(0))
    selectors = arith.select(is_upper, odd, even), arith.select(is_upper, even, odd)
    base = _sum(_address(transposed_w), _times(upper, k // _ROW_BYTES * 8 * _ROW_BYTES), _times(quad, 4))
    places = {}
    for turn in range(2):
        row = _sum(_times(arith.andi(pair, i32(3)), 2), arith.xori(upper, i32(turn)))
        for half in range(2):
            chunk = arith.xori(_sum(_times(warp, 2), i32(half)), row)
            places[turn, half] = _sum(base, _times(row, _ROW_BYTES), _times(chunk, _CHUNK))
    for (square, column), words in read.items():
        start = (2 * column * (k // _ROW_BYTES) + square) * 8 * _ROW_BYTES
        for half in range(2):
            for turn in range(2):
                mgpu.utils.inline_ptx(
                    "{ .reg .b32 w; prmt.b32 w, $1, $2, $3; st.shared.b32 [$0], w; }",
                    _sum(places[turn, half], i32(start)),
                    *words[2 * half : 2 * half + 2],
                    selectors[turn],
                    has_side_effects=True,
                )


def _load(address: Any) -> list[Any]:
    """Reads four matrices of 8 by 8 byte pairs, transposed."""
    word = i32(0).type
    found = llvm.inline_asm(
        llvm.StructType.get_literal([word] * 4),
        [address],
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, found, [i]) for i in range(4)]


def _address(ref: Any) -> Any:
    """Returns the base address of shared memory for PTX."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def _times(number: Any, factor: int) -> Any:
    return arith.muli(number, i32(factor))


def _sum(first: Any, *others: Any) -> Any:
    for other in others:
        first = arith.addi(first, other)
    return first
