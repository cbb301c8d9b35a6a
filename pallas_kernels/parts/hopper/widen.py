"""Rows of 8-bit numbers in shared memory become rows of 16 bits: each number times the factor of its column."""

from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.registers import element, with_element
from pallas_kernels.parts.hopper.tile import WARPGROUP, i32, thread_of_warpgroup, tiled

_CHUNK: Final = 8  # numbers that a thread takes at once: 16 bytes of the result
_GROUP: Final = 8  # rows of a tile of swizzled memory


def widen_rows(source: Any, target: Any, factors: Any, fp8: bool, interpret: bool) -> None:
    """Writes 8-bit numbers times the factors of their columns, in float32, rounded to the dtype of the target.

    A warpgroup does so. Who reads the target waits for a barrier behind a fence.

    Args:
        source: Shared memory (rows, n) int8, row by row; n is a multiple of 32 up to 256, rows one of 64.
        target: Shared memory (rows, n) bfloat16 or float16, stored as `tile.tiled` says.
        factors: GPU memory (n,) float32.
        fp8: Whether the source holds the bits of float8_e4m3fn.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    rows, columns = source.shape
    if interpret:
        read = source[...]
        read = lax.bitcast_convert_type(read, jnp.float8_e4m3fn) if fp8 else read
        target[...] = (read.astype(jnp.float32) * factors[...][None]).astype(target.dtype)
        return
    text = _fp8 if fp8 else _int8
    kind = "bf16" if target.dtype == jnp.bfloat16 else "f16"
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(tiled(target.dtype, columns)), plgpu.RefType())
    )

    @inline  # type: ignore[untyped-decorator]
    def widen(_: Any, source: Any, target: Any, factors: Any) -> None:
        byte, word, f32 = (ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32), ir.F32Type.get())
        chunks = columns // _CHUNK
        step = 1 << (WARPGROUP // chunks).bit_length() - 1  # rows that are taken at once
        thread = thread_of_warpgroup()
        chunk, row = arith.remui(thread, i32(chunks)), arith.divui(thread, i32(chunks))
        bases = [mgpu.utils.memref_ptr(x) for x in (source, target, factors)]
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, i32(step * chunks))):
            four = ir.VectorType.get((4,), f32)
            at = mgpu.utils.getelementptr(bases[2], [arith.muli(chunk, i32(_CHUNK))], f32)
            read = (llvm.load(four, mgpu.utils.getelementptr(at, [4 * i], f32)) for i in range(2))
            scales = [element(four_of_them, i) for four_of_them in read for i in range(4)]
            start = arith.addi(arith.muli(row, i32(columns)), arith.muli(chunk, i32(_CHUNK)))
            first = mgpu.utils.getelementptr(bases[0], [start], byte)
            places = list(_places(target, row, chunk, rows, step))
            # All are read before any is written: ptxas keeps a read behind the writes before it, one latency each.
            pairs = [
                llvm.load(ir.VectorType.get((2,), word), mgpu.utils.getelementptr(first, [i * step * columns], byte))
                for i in range(len(places))
            ]
            for pair, (phase, offset) in zip(pairs, places, strict=True):
                found = llvm.mlir_undef(ir.VectorType.get((4,), word))
                for half in range(2):
                    operands = [element(pair, half), *scales[4 * half : 4 * half + 4]]
                    results = mgpu.utils.inline_ptx(text(kind), *operands, result_types=[word, word])
                    for j, result in enumerate(results):
                        found = with_element(found, 2 * half + j, result)
                place = mgpu.utils.getelementptr(bases[1], [phase], byte)
                llvm.store(found, mgpu.utils.getelementptr(place, [offset], byte))

    widen(source, target, factors)


def _places(target: Any, row: Any, chunk: Any, rows: int, step: int) -> Iterator[tuple[Any, int]]:
    """Yields where in `target` this thread's chunks are, in bytes: a number for the thread and a constant."""
    _, squares, _, width = ir.MemRefType(target.type).shape
    in_row = width // _CHUNK  # chunks of a row of a tile
    square, atom = arith.divui(chunk, i32(in_row)), _GROUP * width * 2
    own = arith.remui(chunk, i32(in_row))
    found: dict[int, Any] = {}
    for first in range(0, rows, step):
        phase = first % _GROUP
        if phase not in found:
            inner = arith.addi(arith.remui(row, i32(_GROUP)), i32(phase))
            # The hardware's swizzle: rows of 128 bytes by their number, of 64 bytes by half of it.
            moved = arith.xori(own, inner if in_row == _GROUP else arith.shrui(inner, i32(1)))
            parts = (
                arith.muli(arith.divui(row, i32(_GROUP)), i32(squares * atom)),
                arith.muli(square, i32(atom)),
                arith.muli(inner, i32(width * 2)),
                arith.muli(moved, i32(2 * _CHUNK)),
            )
            total = parts[0]
            for part in parts[1:]:
                total = arith.addi(total, part)
            found[phase] = total
        yield found[phase], first // _GROUP * squares * atom


def _int8(kind: str) -> str:
    """Returns PTX that makes two words $0, $1 of four bytes $2 and their factors $3 to $6.

    A byte that is 128 more is put below the exponent of 2**23, which is taken away again: exact, and no conversion.
    """
    numbers = "".join(
        f" prmt.b32 b, w, 0x4B000000, {0x7540 + i:#x}; mov.b32 x{i}, b; sub.rn.f32 x{i}, x{i}, 0f4B000080;"
        f" mul.rn.f32 x{i}, x{i}, ${3 + i};"
        for i in range(4)
    )
    return (
        f"{{ .reg .b32 w, b; .reg .f32 x0, x1, x2, x3; xor.b32 w, $2, 0x80808080;{numbers}"
        f" cvt.rn.{kind}x2.f32 $0, x1, x0; cvt.rn.{kind}x2.f32 $1, x3, x2; }}"
    )


def _fp8(kind: str) -> str:
    """Returns PTX as `_int8`, of four bytes of float8_e4m3fn."""
    numbers = "".join(
        f" cvt.rn.f16x2.e4m3x2 p, h{i}; mov.b32 {{a, b}}, p; cvt.f32.f16 x{2 * i}, a; cvt.f32.f16 x{2 * i + 1}, b;"
        for i in range(2)
    )
    products = "".join(f" mul.rn.f32 x{i}, x{i}, ${3 + i};" for i in range(4))
    return (
        f"{{ .reg .b16 h0, h1, a, b; .reg .b32 p; .reg .f32 x0, x1, x2, x3; mov.b32 {{h0, h1}}, $2;{numbers}{products}"
        f" cvt.rn.{kind}x2.f32 $0, x1, x0; cvt.rn.{kind}x2.f32 $1, x3, x2; }}"
    )


def widened(x: jax.Array, factors: jax.Array, dtype: Any) -> jax.Array:
    """Returns what `widen_rows` makes of an array, by XLA.

    Args:
        x: (B, S, K, H) int8 or float8_e4m3fn.
        factors: (B or 1, K, H or 1) float32.
        dtype: bfloat16 or float16.
    """
    return (x.astype(jnp.float32) * factors[:, None]).astype(dtype)
