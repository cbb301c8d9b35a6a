"""Rows of bytes that a weight of zero would not hide become zeros, as `clean` does with rows of 16 bits."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.clean import CHUNK, is_within, packed_bits, store_cleaned
from pallas_kernels.parts.hopper.registers import element
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup, tiled
from pallas_kernels.parts.hopper.widen import widening


def clean_bytes(
    ref: Any, factors: Any, first: jax.Array, end: jax.Array, found: Any, dtype: Any, fp8: bool, interpret: bool
) -> None:
    """Writes zeros to rows of bytes outside [first, end), and to those that are not finite in 16 bits.

    A factor that is not finite makes nan of zeros too: who reads the rows takes such factors for zeros.

    Args:
        ref: Shared memory (128, n) int8, stored as `tile.tiled` says, n 64 or 128.
        factors: (n,) float32 in GPU memory.
        first: The first row to keep, int32.
        end: The end of the rows to keep, int32.
        found: Shared memory (4,) int32, as for `clean.clean_rows`.
        dtype: Of the products of bytes and factors, bfloat16 or float16.
        fp8: Whether bytes are float8_e4m3fn; else they are integers.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    rows, columns = ref.shape
    if interpret:
        row, read = lax.iota(jnp.int32, rows), ref[...]
        numbers = lax.bitcast_convert_type(read, jnp.float8_e4m3fn) if fp8 else read
        wide = (numbers.astype(jnp.float32) * factors[...][None]).astype(dtype)
        inside = (row >= first) & (row < end)
        bad = inside & ~jnp.isfinite(wide.astype(jnp.float32)).all(axis=1)
        ref[...] = jnp.where((inside & ~bad)[:, None], read, jnp.zeros((), ref.dtype))
        found[...] = packed_bits(bad)
        return
    number, kind = plgpu.Layout.WG_SPLAT(()), "bf16" if dtype == jnp.bfloat16 else "f16"
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled(jnp.int8, columns)), plgpu.RefType(), number, number, plgpu.RefType())
    )

    @inline  # type: ignore[untyped-decorator]
    def clean(_: Any, ref: Any, factors: Any, first: Any, end: Any, found: Any) -> None:
        # A thread has a row. Swizzling moves its chunks of 16 bytes, each of which has factors of its own.
        word, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        four = ir.VectorType.get((4,), word)
        base, thread, zero = mgpu.utils.memref_ptr(ref), thread_of_warpgroup(), i32(0)
        inner = arith.remui(thread, i32(8))
        swizzle = inner if columns == 128 else arith.shrui(inner, i32(1))
        start = arith.muli(thread, i32(columns // CHUNK))
        inside = is_within(thread, first, end)
        text, places, sums = widening(fp8, kind), [], zero
        multiply = f"fma.rn.{kind}x2 $0, $1, $2, $3;"
        for chunk in range(columns // CHUNK):
            place = mgpu.utils.getelementptr(base, [arith.addi(start, arith.xori(swizzle, i32(chunk)))], four)
            places.append(place)
            words = llvm.load(four, place)
            for i in range(4):
                at = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(factors), [i32(chunk * CHUNK + 4 * i)], f32)
                scales = llvm.load(ir.VectorType.get((4,), f32), at)
                operands = [element(words, i), *(element(scales, j) for j in range(4))]
                pairs = mgpu.utils.inline_ptx(text, *operands, result_types=[word, word], has_side_effects=True)
                for pair in pairs:  # zero times it is 0 or nan, and nan stays
                    sums = mgpu.utils.inline_ptx(multiply, pair, zero, sums, result_types=word)
        # -0 is a product of a negative number.
        store_cleaned(thread, inside, arith.andi(sums, i32(0x7FFF7FFF)), places, found)

    clean(ref, factors, first, end, found)
