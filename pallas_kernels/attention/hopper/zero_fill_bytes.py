"""Zero-fills float8 rows that a zero weight would not mask, like `zero_fill` for 16-bit rows."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention.hopper.zero_fill import CHUNK, is_within, packed_bits, store_zero_filled
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.registers import element
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup, tiled


def zero_fill_bytes(ref: Any, first: jax.Array, end: jax.Array, found: Any, interpret: bool) -> None:
    """Zero-fills rows of float8_e4m3fn outside [first, end) or with nan; there are no infinities.

    Args:
        ref: Shared memory (128, n) int8, the bits, stored as `tile.tiled` says, n 64 or 128.
        first: The first row to keep, int32.
        end: The end of the rows to keep, int32.
        found: Shared memory (4,) int32, as for `zero_fill.zero_fill_rows`.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    rows, columns = ref.shape
    if interpret:
        row, read = lax.iota(jnp.int32, rows), ref[...]
        inside = (row >= first) & (row < end)
        bad = inside & ((read & 0x7F) == 0x7F).any(axis=1)
        ref[...] = jnp.where((inside & ~bad)[:, None], read, jnp.zeros((), ref.dtype))
        found[...] = packed_bits(bad)
        return
    number = plgpu.Layout.WG_SPLAT(())

    @inline(plgpu.RefType(tiled(jnp.int8, columns)), number, number, plgpu.RefType())
    def zero_fill(ref: Any, first: Any, end: Any, found: Any) -> None:
        # A thread has a row. Swizzling permutes its chunks of 16 bytes.
        word = ir.IntegerType.get_signless(32)
        four = ir.VectorType.get((4,), word)
        base, thread, bits = mgpu.utils.memref_ptr(ref), thread_of_warpgroup(), i32(0)
        inner = arith.remui(thread, i32(8))
        swizzle = inner if columns == 128 else arith.shrui(inner, i32(1))
        start = arith.muli(thread, i32(columns // CHUNK))
        places = []
        for chunk in range(columns // CHUNK):
            place = mgpu.utils.getelementptr(base, [arith.addi(start, arith.xori(swizzle, i32(chunk)))], four)
            places.append(place)
            words = llvm.load(four, place)
            for i in range(4):  # nan has the largest magnitude: adding one sets the sign bit
                size = arith.andi(element(words, i), i32(0x7F7F7F7F))
                bits = arith.ori(bits, arith.addi(size, i32(0x01010101)))
        bits = arith.andi(bits, i32(-0x7F7F7F80))
        store_zero_filled(thread, is_within(thread, first, end), bits, places, found)

    zero_fill(ref, first, end, found)
