"""The sums of weights of `MmaAttentionContract`: eight columns, each thread with two of them in two rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, number_of, with_number
from pallas_kernels.parts.hopper.tile import ROW, ROWS, TILE, filled

COLUMNS = 8


class ColumnSums(NamedTuple):
    """Sums (64,) float32 of the columns 2 i and 2 i + 1 of lane i; the interpreter has all eight in one array."""

    even: jax.Array
    odd: jax.Array


def no_weights(interpret: bool) -> ColumnSums:
    """Returns the sums before any weight."""
    if interpret:
        return ColumnSums(jnp.zeros((ROWS, COLUMNS), jnp.float32), filled((ROWS,), 0))
    return ColumnSums(filled((ROWS,), 0), filled((ROWS,), 0))


def add_weights(sums: ColumnSums, decay: jax.Array, tile: jax.Array, interpret: bool) -> ColumnSums:
    """Returns fma(sums, decay, columns of a tile): its left half plus its right half, until eight columns are left.

    Args:
        sums: The sums so far.
        decay: (64,) float32.
        tile: (64, n) float32, n a power of two and at least 16.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        while tile.shape[1] > COLUMNS:
            half = tile.shape[1] // 2
            tile = tile[:, :half] + tile[:, half:]
        return ColumnSums(sums.even * decay[:, None] + tile, sums.odd)
    row = held((ROWS,), ROW)

    @inline(ROW, ROW, ROW, TILE, result=(row, row))
    def add(even: Any, odd: Any, decay: Any, tile: Any) -> Any:
        found = [x.registers.copy() for x in (even, odd)]
        # (1, n / 8, 1, 1, 2, 1, ...): pairs of neighbouring columns, for a row of the upper and one of the lower half.
        pairs = tile.registers.reshape(tile.registers.shape[1], 2)
        for half in range(2):
            factor = number_of(decay.registers.flat[half])
            for i, registers in enumerate(found):
                numbers = [element(pair, i) for pair in pairs[:, half]]
                while len(numbers) > 1:
                    middle = len(numbers) // 2
                    numbers = [arith.addf(a, b) for a, b in zip(numbers[:middle], numbers[middle:], strict=True)]
                value = mgpu.utils.inline_ptx(
                    "fma.rn.f32 $0, $1, $2, $3;",
                    number_of(registers.flat[half]),
                    factor,
                    numbers[0],
                    result_types=ir.F32Type.get(),
                )
                registers.flat[half] = with_number(registers.flat[half], value)
        return tuple(fragmented(x, even.layout) for x in found)

    return ColumnSums(*add(*sums, decay, tile))


def total(sums: ColumnSums, interpret: bool) -> jax.Array:
    """Returns the sums (64,) of all columns: halves until one is left."""
    if interpret:
        found = sums.even
        while found.shape[1] > 1:
            half = found.shape[1] // 2
            found = found[:, :half] + found[:, half:]
        return found[:, 0]

    @inline(ROW, ROW, result=held((ROWS,), ROW))
    def add(even: Any, odd: Any) -> Any:
        registers = even.registers.copy()
        for at in range(registers.size):
            halves = [number_of(x.registers.flat[at]) for x in (even, odd)]
            for distance in (2, 1):
                halves = [arith.addf(x, mgpu.utils.shfl_bfly(x, distance)) for x in halves]
            registers.flat[at] = with_number(registers.flat[at], arith.addf(*halves))
        return fragmented(registers, even.layout)

    return add(*sums)
