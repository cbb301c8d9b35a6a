"""Rows of TF32 products in registers, loaded from wide tiles of (K, N) weights in shared memory.

Pallas's `wgmma` takes float32 operands only from shared memory, along K. The instruction itself also takes rows from
registers, which allows any memory order: see `wgmma_rows`, which also loads from narrow tiles.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.matmul.hopper.wgmma_rows import bundle
from pallas_kernels.parts.hopper.inline import held, inline
from pallas_kernels.parts.hopper.tile import i32

_K: Final = 8  # elements of K in one instruction
_SQUARE: Final = 32  # elements of a swizzled row
_ROW_BYTES: Final = 128
_TILE_BYTES: Final = 8 * _ROW_BYTES  # 8 swizzled rows


def load_rows(tile: Any, first: int, k: int, n: int, transforms: Any) -> jax.Array:
    """Reads this warpgroup's 64 columns of a tile as wgmma's rows; warpgroup i takes columns from 64 i on.

    Args:
        tile: (K, n) of float32 in shared memory, in (8, 32) tiles, swizzled over 128 bytes.
        first: First row that is read, a multiple of 8.
        k: Rows that are read, a multiple of 8.
        n: Columns.
        transforms: Transforms of `tile`.

    Returns:
        (64, k), a bundle of registers in the order that `wgmma_rows.multiply` expects.
    """
    return inline(plgpu.RefType(transforms), result=held((64, k), plgpu.Layout.WGMMA))(
        lambda ref: _load(ref, first, k, n)
    )(tile)


def _load(tile: Any, first: int, k: int, n: int) -> Any:
    """Returns this thread's elements, for every 8 of K: (row, K) = (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4).

    g is the thread's number in its warp over 4, t the rest. In each read, threads with even t take t and the others t +
    4, or vice versa, so a warp covers all 32 banks.
    """
    base, thread = utils.memref_ptr(tile), mgpu.thread_idx()
    t = arith.andi(thread, i32(3))
    odd = arith.andi(t, i32(1))
    is_odd = arith.cmpi(arith.CmpIPredicate.eq, odd, i32(1))
    places = {}
    for reading in range(2):
        at = arith.addi(t, arith.muli(arith.xori(odd, i32(reading)), i32(4)))  # in 8 of K
        for half in range(2):
            places[reading, half] = _place(thread, at, half)
    scalars: list[Any] = []
    for i in range(k // _K):
        step = i32((first // _K + i) * (n // _SQUARE) * _TILE_BYTES)
        read = {key: _load_one(base, arith.addi(place, step)) for key, place in places.items()}
        for upper in (0, 1):
            scalars += [arith.select(is_odd, read[1 - upper, half], read[upper, half]) for half in (0, 1)]
    return bundle(scalars)


def _place(thread: Any, at: Any, half: int) -> Any:
    """Returns the byte offset of row `at` of 8 at this thread's column: g, or g + 8 for the other half."""
    g = arith.andi(arith.shrui(thread, i32(2)), i32(7))
    warp = arith.andi(arith.shrui(thread, i32(5)), i32(3))
    warpgroup = arith.shrui(thread, i32(7))
    square = arith.addi(arith.muli(warpgroup, i32(2)), arith.shrui(warp, i32(1)))
    chunk = arith.addi(arith.muli(arith.andi(warp, i32(1)), i32(4)), arith.shrui(g, i32(2)))
    place = arith.muli(arith.xori(arith.addi(chunk, i32(2 * half)), at), i32(16))
    place = arith.addi(place, arith.muli(arith.andi(g, i32(3)), i32(4)))
    place = arith.addi(place, arith.muli(at, i32(_ROW_BYTES)))
    return arith.addi(place, arith.muli(square, i32(_TILE_BYTES)))


def _load_one(base: Any, offset: Any) -> Any:
    return llvm.load(ir.F32Type.get(), utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8)))
