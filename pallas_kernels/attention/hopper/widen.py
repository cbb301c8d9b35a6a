"""Rows of 8-bit numbers in shared memory become rows of 16 bits."""

from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention.eight_bits import numbers
from pallas_kernels.contract import eight_bit_contract
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, with_element
from pallas_kernels.parts.hopper.tile import WARPGROUP, i32, thread_of_warpgroup, tiled

_CHUNK: Final = 8  # numbers that a thread takes at once: 16 bytes of the result
_GROUP: Final = 8  # rows of a tile of swizzled memory


def read_bytes(source: Any, interpret: bool) -> jax.Array:
    """Returns 8-bit numbers of shared memory in the registers of a warpgroup, for `write_widened`.

    All are read before any is written: ptxas keeps a read after the writes before it, one latency for each.

    Args:
        source: Shared memory (rows, n) int8, row by row; n is a multiple of 32, rows one of 64.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    rows, columns = source.shape
    if interpret:
        return source[...]
    strip, step = _strip(columns)
    places = [(at, first) for at in range(0, columns, strip) for first in range(0, rows, step)]
    layout, words = plgpu.Layout.WG_STRIDED, (2 * WARPGROUP * len(places),)
    result = held(words, layout(words, vec_size=2), jnp.int32)

    @inline(plgpu.RefType(), result=result)
    def load(source: Any) -> Any:
        byte, pair = ir.IntegerType.get_signless(8), ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
        chunk, row = _own(strip)
        start = arith.addi(arith.muli(row, i32(columns)), arith.muli(chunk, i32(_CHUNK)))
        first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(source), [start], byte)
        registers = np.empty((len(places),), dtype=object)
        for i, (at, above) in enumerate(places):
            registers[i] = llvm.load(pair, mgpu.utils.getelementptr(first, [above * columns + at], byte))
        return fragmented(registers, mgpu.WGStridedFragLayout(words, 2), signed=True)

    return load(source)


def write_widened(numbers: jax.Array, target: Any, fp8: bool, interpret: bool) -> None:
    """Writes 8-bit numbers, in units of `EightBitContract`, with the dtype of the target: exactly.

    A warpgroup does so. Who reads the target waits for a barrier after a fence.

    Args:
        numbers: What `read_bytes` returned.
        target: Shared memory (rows, n) bfloat16 or float16, stored as `tile.tiled` says.
        fp8: Whether the numbers are the bits of float8_e4m3fn.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    rows, columns = target.shape
    if interpret:
        target[...] = in_units(numbers, target.dtype, fp8)
        return
    text = widening(fp8, "bf16" if target.dtype == jnp.bfloat16 else "f16")
    layout = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=2)

    @inline(layout, plgpu.RefType(tiled(target.dtype, columns)))
    def widen(numbers: Any, target: Any) -> None:
        byte, word = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        base = mgpu.utils.memref_ptr(target)
        places = _places(target, rows, *_strip(columns))
        for pair, (phase, offset) in zip(numbers.registers.flat, places, strict=True):
            found = llvm.mlir_undef(ir.VectorType.get((4,), word))
            for half in range(2):
                results = mgpu.utils.inline_ptx(text, element(pair, half), result_types=[word, word])
                for j, result in enumerate(results):
                    found = with_element(found, 2 * half + j, result)
            place = mgpu.utils.getelementptr(base, [phase], byte)
            llvm.store(found, mgpu.utils.getelementptr(place, [offset], byte))

    widen(numbers, target)


def _strip(columns: int) -> tuple[int, int]:
    """Returns how many columns and rows a warpgroup takes at once: of the columns the largest power of two."""
    width = columns & -columns
    return width, WARPGROUP * _CHUNK // width


def _own(strip: int) -> tuple[Any, Any]:
    """Returns this thread's chunk of a strip, and its row."""
    thread, chunks = thread_of_warpgroup(), i32(strip // _CHUNK)
    return arith.remui(thread, chunks), arith.divui(thread, chunks)


def _places(target: Any, rows: int, strip: int, step: int) -> Iterator[tuple[Any, int]]:
    """Yields where this thread's chunks of `target` lie: a number of bytes of the thread, and a constant."""
    _, squares, _, width = ir.MemRefType(target.type).shape
    in_row = width // _CHUNK  # chunks of a row of a tile
    atom, in_strip = _GROUP * width * 2, strip // width
    chunk, row = _own(strip)
    square, own = arith.divui(chunk, i32(in_row)), arith.remui(chunk, i32(in_row))
    found: dict[int, Any] = {}
    for number in range(squares // in_strip):
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
            yield found[phase], first // _GROUP * squares * atom + number * in_strip * atom


def widening(fp8: bool, kind: str, order: tuple[int, int, int, int] = (0, 1, 2, 3)) -> str:
    """Returns PTX that makes two words $0, $1 of four bytes $2, in units of `EightBitContract`: exactly.

    An integer that is 128 more is the lower part of a float: in float16 of one below 2**11, in bfloat16 of one that is
    subnormal, where the step is the same up to 255. One instruction for two of them takes the 128 away and multiplies.

    Args:
        fp8: Whether the bytes are float8_e4m3fn; else they are integers.
        kind: bf16 or f16.
        order: The places of the four bytes in $2.
    """
    if fp8:
        factor = _half(eight_bit_contract("float8_e4m3fn").unit, "f16")
        moved = "" if order == (0, 1, 2, 3) else f" prmt.b32 w, w, 0, {_selector(order):#x};"
        text = f" mov.b32 w, $2;{moved} mov.b32 {{h0, h1}}, w; mov.b32 c, {factor:#x};"
        for i in range(2):
            text += f" cvt.rn.f16x2.e4m3x2 p, h{i}; mul.rn.f16x2 p, p, c;"
            if kind == "f16":
                text += f" mov.b32 ${i}, p;"
            else:
                text += f" mov.b32 {{a, b}}, p; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 ${i}, y, x;"
    else:
        unit = eight_bit_contract("int8").unit
        above, one = (0x64646464, 2.0**10) if kind == "f16" else (0, 0.0)
        step = 1.0 if kind == "f16" else 2.0**-133
        factor, less = _half(unit / step, kind), _half(-(one + 128) * unit, kind)
        text = f" xor.b32 w, $2, 0x80808080; mov.b32 c, {factor:#x}; mov.b32 d, {less:#x};"
        for i in range(2):
            low, high = order[2 * i : 2 * i + 2]
            text += f" prmt.b32 p, w, {above:#x}, {0x4040 + low + (high << 8):#x}; fma.rn.{kind}x2 ${i}, p, c, d;"
    return f"{{ .reg .b16 h0, h1, a, b; .reg .b32 w, p, c, d; .reg .f32 x, y;{text} }}"


def _half(number: float, kind: str) -> int:
    """Returns a word of two equal numbers of 16 bits."""
    bits = int(np.asarray(number, jnp.bfloat16 if kind == "bf16" else np.float16).view(np.uint16))
    return bits << 16 | bits


def _selector(order: tuple[int, ...]) -> int:
    """Returns how `prmt` takes bytes from places of a word."""
    return sum(place << 4 * i for i, place in enumerate(order))


def in_units(stored: jax.Array, dtype: Any, fp8: bool) -> jax.Array:
    """Returns what `write_widened` makes of bytes, int8, in the interpreter."""
    return numbers(lax.bitcast_convert_type(stored, jnp.float8_e4m3fn) if fp8 else stored, dtype)
