"""Rows of 8-bit numbers in shared memory become rows of 16 bits: each number times the factor of its column."""

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

from pallas_kernels.parts.hopper.registers import element, with_element
from pallas_kernels.parts.hopper.tile import WARPGROUP, i32, thread_of_warpgroup, tiled

_CHUNK: Final = 8  # numbers that a thread takes at once: 16 bytes of the result
_HALF: Final = _CHUNK // 2
_GROUP: Final = 8  # rows of a tile of swizzled memory


def read_bytes(source: Any, interpret: bool) -> jax.Array:
    """Returns 8-bit numbers of shared memory in the registers of a warpgroup, for `write_widened`.

    All are read before any is written: ptxas keeps a read behind the writes before it, one latency for each.

    Args:
        source: Shared memory (rows, n) int8, row by row; n is a multiple of 32, rows one of 64.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    rows, columns = source.shape
    if interpret:
        read: jax.Array = source[...]
        return read
    strip, step = _strip(columns)
    places = [(at, first) for at in range(0, columns, strip) for first in range(0, rows, step)]
    layout, words = plgpu.Layout.WG_STRIDED, (2 * WARPGROUP * len(places),)
    result = plgpu.ShapeDtypeStruct(words, jnp.dtype(jnp.int32), layout=layout(words, vec_size=2))
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)

    @inline  # type: ignore[untyped-decorator]
    def load(_: Any, source: Any) -> Any:
        byte, pair = ir.IntegerType.get_signless(8), ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
        chunk, row = _own(strip)
        start = arith.addi(arith.muli(row, i32(columns)), arith.muli(chunk, i32(_CHUNK)))
        first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(source), [start], byte)
        registers = np.empty((len(places),), dtype=object)
        for i, (at, above) in enumerate(places):
            registers[i] = llvm.load(pair, mgpu.utils.getelementptr(first, [above * columns + at], byte))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGStridedFragLayout(words, 2), _is_signed=True)

    loaded: jax.Array = load(source)
    return loaded


def read_factors(factors: Any, interpret: bool) -> jax.Array:
    """Returns factors of columns (n,) float32 in GPU memory in the registers of a warpgroup, for `write_widened`."""
    if interpret:
        read: jax.Array = factors[...]
        return read
    (columns,) = factors.shape
    strip, _ = _strip(columns)
    places = [at + half for at in range(0, columns, strip) for half in range(0, _CHUNK, _HALF)]
    shape = (WARPGROUP * _HALF * len(places),)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=_HALF)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)

    @inline  # type: ignore[untyped-decorator]
    def load(_: Any, factors: Any) -> Any:
        f32 = ir.F32Type.get()
        chunk, _ = _own(strip)
        first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(factors), [arith.muli(chunk, i32(_CHUNK))], f32)
        registers = np.empty((len(places),), dtype=object)
        for i, at in enumerate(places):
            registers[i] = llvm.load(ir.VectorType.get((_HALF,), f32), mgpu.utils.getelementptr(first, [at], f32))
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGStridedFragLayout(shape, _HALF), _is_signed=None
        )

    loaded: jax.Array = load(factors)
    return loaded


def write_widened(numbers: jax.Array, target: Any, factors: jax.Array, fp8: bool, interpret: bool) -> None:
    """Writes 8-bit numbers times the factors of their columns, in float32, rounded to the dtype of the target.

    A warpgroup does so. Who reads the target waits for a barrier behind a fence.

    Args:
        numbers: What `read_bytes` returned.
        target: Shared memory (rows, n) bfloat16 or float16, stored as `tile.tiled` says.
        factors: What `read_factors` returned.
        fp8: Whether the numbers are the bits of float8_e4m3fn.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    rows, columns = target.shape
    if interpret:
        read = lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn) if fp8 else numbers
        target[...] = (read.astype(jnp.float32) * factors[None]).astype(target.dtype)
        return
    kind = "bf16" if target.dtype == jnp.bfloat16 else "f16"
    text = widening(fp8, kind)
    layout = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=2)
    of_factors = plgpu.Layout.WG_STRIDED(factors.shape, vec_size=_HALF)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(tiled(target.dtype, columns)), of_factors))

    @inline  # type: ignore[untyped-decorator]
    def widen(_: Any, numbers: Any, target: Any, factors: Any) -> None:
        byte, word = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        base = mgpu.utils.memref_ptr(target)
        scales = [element(register, i) for register in factors.registers.flat for i in range(_HALF)]
        places = _places(target, rows, *_strip(columns))
        for pair, (strip, phase, offset) in zip(numbers.registers.flat, places, strict=True):
            found = llvm.mlir_undef(ir.VectorType.get((4,), word))
            for half in range(2):
                start = _CHUNK * strip + _HALF * half
                operands = [element(pair, half), *scales[start : start + _HALF]]
                results = mgpu.utils.inline_ptx(text, *operands, result_types=[word, word])
                for j, result in enumerate(results):
                    found = with_element(found, 2 * half + j, result)
            place = mgpu.utils.getelementptr(base, [phase], byte)
            llvm.store(found, mgpu.utils.getelementptr(place, [offset], byte))

    widen(numbers, target, factors)


def _strip(columns: int) -> tuple[int, int]:
    """Returns how many columns and rows a warpgroup takes at once: of the columns the largest power of two."""
    width = columns & -columns
    return width, WARPGROUP * _CHUNK // width


def _own(strip: int) -> tuple[Any, Any]:
    """Returns this thread's chunk of a strip, and its row."""
    thread, chunks = thread_of_warpgroup(), i32(strip // _CHUNK)
    return arith.remui(thread, chunks), arith.divui(thread, chunks)


def _places(target: Any, rows: int, strip: int, step: int) -> Iterator[tuple[int, Any, int]]:
    """Yields this thread's chunks of `target`: the strip, and where, a number of bytes of the thread and a constant."""
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
            yield number, found[phase], first // _GROUP * squares * atom + number * in_strip * atom


def widening(fp8: bool, kind: str, order: tuple[int, int, int, int] = (0, 1, 2, 3)) -> str:
    """Returns PTX that makes two words $0, $1 of four bytes $2 times their factors $3 to $6, each product rounded.

    An integer that is 128 more is put below the exponent of 2**23, which is taken away again: exact, and no conversion.

    Args:
        fp8: Whether the bytes are float8_e4m3fn; else they are integers.
        kind: bf16 or f16.
        order: The places of the four bytes in $2.
    """
    if fp8:
        moved = "" if order == (0, 1, 2, 3) else f" prmt.b32 w, w, 0, {_selector(order):#x};"
        numbers = f" mov.b32 w, $2;{moved} mov.b32 {{h0, h1}}, w;" + "".join(
            f" cvt.rn.f16x2.e4m3x2 p, h{i}; mov.b32 {{a, b}}, p; cvt.f32.f16 x{2 * i}, a; cvt.f32.f16 x{2 * i + 1}, b;"
            for i in range(2)
        )
    else:
        numbers = " xor.b32 w, $2, 0x80808080;" + "".join(
            f" prmt.b32 p, w, 0x4B000000, {0x7540 + place:#x}; mov.b32 x{i}, p; sub.rn.f32 x{i}, x{i}, 0f4B000080;"
            for i, place in enumerate(order)
        )
    products = "".join(f" mul.rn.f32 x{i}, x{i}, ${3 + i};" for i in range(4))
    return (
        f"{{ .reg .b16 h0, h1, a, b; .reg .b32 w, p; .reg .f32 x0, x1, x2, x3;{numbers}{products}"
        f" cvt.rn.{kind}x2.f32 $0, x1, x0; cvt.rn.{kind}x2.f32 $1, x3, x2; }}"
    )


def _selector(order: tuple[int, ...]) -> int:
    """Returns how `prmt` takes bytes from places of a word."""
    return sum(place << 4 * i for i, place in enumerate(order))


def widened(x: jax.Array, factors: jax.Array, dtype: Any) -> jax.Array:
    """Returns what `write_widened` makes of an array, by XLA.

    Args:
        x: (B, S, K, H) int8 or float8_e4m3fn.
        factors: (B or 1, K, H or 1) float32.
        dtype: bfloat16 or float16.
    """
    return (x.astype(jnp.float32) * factors[:, None]).astype(dtype)
