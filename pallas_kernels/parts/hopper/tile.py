"""Tiles of 64 rows that a warpgroup holds in registers in wgmma's accumulator layout, and per-row scalars.

Products, fused multiply-adds and exponentials are single PTX instructions, which ptxas may neither contract nor split.
Each has a plain JAX version for Mosaic's interpreter, which does not support PTX.
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import apply_ptx, element, number_of, with_element, with_number
from pallas_kernels.parts.ptx import hexadecimal

ROWS: Final = 64
"""Rows of a tile."""

WARPGROUP: Final = 128
"""Threads of a warpgroup."""

WARP: Final = 32
"""Threads of a warp."""

TILE: Final = plgpu.Layout.WGMMA
ROW: Final = plgpu.Layout.WGMMA.reduce(1)


_SWIZZLE: Final[Any] = plgpu.SwizzleTransform  # an abstract class to mypy

PLAIN: Final[tuple[Any, ...]] = (_SWIZZLE(128),)
"""Transforms of shared memory of plain rows of 128 bytes, whose bytes lie as in tiles of 8 rows. TMA reads and writes
them from any row on, while tiles begin at multiples of 8."""


def tiled(dtype: Any, columns: int | None = None) -> tuple[Any, ...]:
    """Returns the transforms of shared memory that wgmma and TMA require: tiles of 8 swizzled rows.

    Args:
        dtype: Dtype of the elements.
        columns: Columns of the memory; if they are not a multiple of 128 bytes, the swizzle is 64 or 32 bytes.
    """
    pallas: Any = plgpu  # abstract classes to mypy
    size = jnp.dtype(dtype).itemsize
    row = next((row for row in (128, 64) if columns is None or columns * size % row == 0), 32)
    return pallas.TilingTransform((8, row // size)), pallas.SwizzleTransform(row)


def across(x: jax.Array, columns: int) -> jax.Array:
    """Broadcasts one number per row to a tile of `columns` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def along(numbers: Any, start: Any, shape: tuple[int, int], axis: int, interpret: Any) -> jax.Array:
    """Loads numbers from GPU memory and broadcasts them to a float32 tile of `shape`, one for each row or column.

    Args:
        numbers: (n,) of any float dtype. Indices past its end read the last number.
        start: Index of the tile's first row or column.
        shape: Rows, a multiple of 64, and columns, a multiple of 8.
        axis: 0 for one number per row, 1 for one per column.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    size, last = shape[axis], numbers.shape[0] - 1
    if interpret:
        places = jnp.minimum(start + jnp.arange(size, dtype=jnp.int32), last)
        return lax.broadcast_in_dim(numbers[...][places].astype(jnp.float32), shape, [axis])
    result = held((size,), TILE.reduce(1 - axis))
    layout = mgpu.WGMMA_LAYOUT.reduce((1 - axis,))

    @inline(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), result=result)
    def load(ref: Any, start: Any) -> Any:
        f32, (first,) = ir.F32Type.get(), start.registers.flat
        registers = np.empty(layout.registers_shape((size,)), dtype=object)
        for at, (place,) in zip(np.ndindex(registers.shape), layout.thread_idxs((size,)), strict=True):
            register = llvm.mlir_undef(ir.VectorType.get((layout.vector_length,), f32))
            for i in range(layout.vector_length):
                index = arith.addi(arith.addi(first, arith.index_cast(i32(0).type, place)), i32(i))
                index = arith.index_cast(ir.IndexType.get(), arith.minsi(index, i32(last)))
                number = memref.load(ref, [index])
                number = number if number.type == f32 else arith.extf(f32, number)
                register = with_element(register, i, number)
            registers[at] = register
        return fragmented(registers, layout)

    return lax.broadcast_in_dim(load(numbers, jnp.int32(start)), shape, [axis])


def filled(shape: tuple[int, ...], value: float) -> jax.Array:
    """Returns a constant float32 tile, or one number per row."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), TILE if len(shape) == 2 else ROW)


@dataclass(frozen=True)
class Arithmetic:
    """Instructions on float32 tiles and on per-row numbers.

    Attributes:
        layout: How a warpgroup holds a tile; per-row numbers have the layout of a sum over its columns.
        interpret: Whether Mosaic's interpreter runs the kernel.
        axis: The axis of such a sum; 0 for per-column numbers.
    """

    layout: Any = TILE
    interpret: bool = False
    axis: int = 1

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns a * b, always rounded."""
        return a * b if self.interpret else self._apply("mul.rn.f32 $0, $1, $2;", a, b)

    def sum_in_place(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns a + b, added here.

        LLVM moves a plain sum down to where it is used, beyond loops, and so keeps the registers of both operands.
        """
        if self.interpret:
            return a + b
        return apply_ptx("add.rn.f32 $0, $1, $2;", self.layout, a, b, pinned=True)

    def chosen(self, condition: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns `a` if an integer or truth value, the same in all threads, is not zero, else `b`."""
        if self.interpret:
            return jnp.where(condition != 0, a, b)
        result = held(a.shape, self.layout)

        @inline(plgpu.Layout.WG_SPLAT(()), self.layout, self.layout, result=result)
        def choose(condition: Any, a: Any, b: Any) -> Any:
            (value,) = condition.registers.flat
            true = arith.cmpi(arith.CmpIPredicate.ne, value, i32(0))
            registers = a.registers.copy()
            for at in range(registers.size):
                registers.flat[at] = arith.select(true, a.registers.flat[at], b.registers.flat[at])
            return fragmented(registers, a.layout)

        return choose(jnp.int32(condition), a, b)

    def scaled(self, x: jax.Array, factor: float) -> jax.Array:
        """Returns x * factor, always rounded."""
        return (
            x * jnp.float32(factor) if self.interpret else self._apply(f"mul.rn.f32 $0, $1, {hexadecimal(factor)};", x)
        )

    def fused(self, a: jax.Array, b: jax.Array | float, c: jax.Array | float) -> jax.Array:
        """Returns a * b + c, rounded once on the GPU; Python floats are constants."""
        if self.interpret:
            return a * jnp.float32(b) + jnp.float32(c)
        given, text = [a], ["$1"]
        for x in (b, c):
            if isinstance(x, jax.Array):
                given.append(x)
                text.append(f"${len(given)}")
            else:
                text.append(hexadecimal(x))
        return self._apply(f"fma.rn.f32 $0, {', '.join(text)};", *given)

    def exp2(self, x: jax.Array) -> jax.Array:
        """Returns 2 ** x, with results below 2 ** -126 as 0."""
        return jnp.exp2(x) if self.interpret else self._apply("ex2.approx.ftz.f32 $0, $1;", x)

    def log2(self, x: jax.Array) -> jax.Array:
        """Returns the logarithm to base 2."""
        return jnp.log2(x) if self.interpret else self._apply("lg2.approx.ftz.f32 $0, $1;", x)

    def tanh(self, x: jax.Array, factor: float) -> jax.Array:
        """Returns the hyperbolic tangent of x * factor / (2 * log2(e)), as 1 - 2 / (1 + 2 ** (x * factor))."""
        if self.interpret:
            return 1 - 2 / (1 + jnp.exp2(x * jnp.float32(factor)))
        ptx = (
            f"{{ .reg .f32 t; mul.rn.f32 t, $1, {hexadecimal(factor)}; ex2.approx.ftz.f32 t, t;"
            f" add.rn.f32 t, t, {hexadecimal(1.0)}; rcp.approx.ftz.f32 t, t;"
            f" fma.rn.f32 $0, t, {hexadecimal(-2.0)}, {hexadecimal(1.0)}; }}"
        )
        return self._apply(ptx, x)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """Returns 1 / x, correctly rounded."""
        return 1 / x if self.interpret else self._apply("rcp.rn.f32 $0, $1;", x)

    def rounded_not_negative(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Returns max(x, 0) rounded to bfloat16 or float16, NaN as NaN: one instruction for two numbers."""
        if self.interpret:
            return jnp.maximum(x, 0.0).astype(dtype)
        kind = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]

        @inline(self.layout, result=held(x.shape, self.layout, dtype))
        def convert(x: Any) -> Any:
            word = ir.IntegerType.get_signless(32)
            pair = ir.VectorType.get((2,), ir.BF16Type.get() if kind == "bf16" else ir.F16Type.get())
            registers = np.empty(x.registers.shape, dtype=object)
            for at in np.ndindex(registers.shape):
                low, high = (element(x.registers[at], i) for i in range(2))
                found = mgpu.utils.inline_ptx(f"cvt.rn.relu.{kind}x2.f32 $0, $1, $2;", high, low, result_types=word)
                registers[at] = llvm.bitcast(pair, found)
            return fragmented(registers, x.layout)

        return convert(x)

    def _apply(self, ptx: str, *operands: jax.Array) -> jax.Array:
        """Applies an instruction to every element; $0 is the result, $1, $2, ... are the operands."""
        shape = operands[0].shape
        return apply_ptx(ptx, self.layout if len(shape) == 2 else self.layout.reduce(self.axis), *operands)


def add_to_lanes(total: jax.Array, decay: jax.Array, tile: jax.Array, chains: int, interpret: bool) -> jax.Array:
    """Returns fma(total, decay, sum of the lane's columns) for each of the 4 lanes of a row.

    Lane i has the columns 2 i and 2 i + 1 of every 8. They are added in order in `chains` interleaved chains, and the
    chains by a tree. `add_lanes` reduces the lanes. The interpreter has no lanes and adds whole rows.

    Args:
        total: (64,) float32, sums of the lanes so far.
        decay: (64,) float32, the same in all lanes.
        tile: (64, n) float32.
        chains: A power of two, at most n / 4.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    if interpret:
        return total * decay + tile.sum(axis=1)
    result = held((ROWS,), ROW)

    @inline(ROW, ROW, TILE, result=result)
    def add(total: Any, decay: Any, tile: Any) -> Any:
        registers = total.registers.copy()
        # (1, n / 8, 1, 1, 2, 1, ...): pairs of neighbouring columns, for a row of the upper and one of the lower half.
        pairs = tile.registers.reshape(tile.registers.shape[1], 2)
        for half in range(2):
            numbers = [element(pair, i) for pair in pairs[:, half] for i in range(2)]
            sums = numbers[:chains]
            for at, number in enumerate(numbers[chains:]):
                sums[at % chains] = arith.addf(sums[at % chains], number)
            while len(sums) > 1:
                sums = [arith.addf(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
            own, factor = (number_of(x.registers.flat[half]) for x in (total, decay))
            value = mgpu.utils.inline_ptx(
                "fma.rn.f32 $0, $1, $2, $3;", own, factor, sums[0], result_types=ir.F32Type.get()
            )
            registers.flat[half] = with_number(registers.flat[half], value)
        return fragmented(registers, total.layout)

    return add(total, decay, tile)


def add_lanes(total: jax.Array, interpret: bool) -> jax.Array:
    """Adds the lanes of `add_to_lanes` as a tree, (0 + 1) + (2 + 3); all lanes hold the result."""
    if interpret:
        return total
    result = held((ROWS,), ROW)

    @inline(ROW, result=result)
    def add(total: Any) -> Any:
        registers = total.registers.copy()
        for at in range(registers.size):
            register = registers.flat[at]
            number = number_of(register)
            for distance in (1, 2):
                number = arith.addf(number, mgpu.utils.shfl_bfly(number, distance))
            registers.flat[at] = with_number(register, number)
        return fragmented(registers, total.layout)

    return add(total)


def thread_of_warpgroup() -> Any:
    """Returns the index of the thread in its warpgroup, int32."""
    return arith.remui(mgpu.utils.thread_idx(), i32(WARPGROUP))


def thread_of_warp() -> Any:
    """Returns the index of the thread in its warp, int32."""
    return arith.remui(mgpu.utils.thread_idx(), i32(WARP))


def part_of_warpgroup(threads: int = WARP) -> jax.Array:
    """Returns which part of a warpgroup a thread is in, int32: a number that each part holds for itself.

    Args:
        threads: Threads of a part, by default those of a warp.
    """
    number = plgpu.Layout.WG_SPLAT(())

    @inline(result=held((), number, jnp.int32))
    def part() -> Any:
        return mgpu.FragmentedArray.splat(arith.divui(thread_of_warpgroup(), i32(threads)), (), is_signed=True)

    return part()


def i32(value: int) -> Any:
    """Returns an int32 constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def store_few(ref: Any, numbers: jax.Array, interpret: bool) -> None:
    """Writes to GPU memory when a warp has less than a 32-byte sector."""
    if interpret or not hasattr(plgpu, "store"):  # JAX 0.11 stores anything in the plain way, 0.12 does not
        ref[...] = numbers
    else:
        plgpu.store(ref, numbers, optimized=False)
