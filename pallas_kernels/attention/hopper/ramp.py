"""Ramps: what grows along a tile by the same step from column to column, as the distance of a key from a query does."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, elementwise, number_of, with_element
from pallas_kernels.parts.hopper.tile import ROW, TILE, i32, thread_of_warpgroup


def add_ramp(tile: jax.Array, factor: float, slope: jax.Array, start: jax.Array, interpret: bool) -> jax.Array:
    """Returns fma(tile, factor, slope * (start + column)) with the product rounded.

    A thread adds constants to the number that its first column has, so that no ramp takes registers. Numbers of columns
    are exact below 2**24.

    Args:
        tile: (64, n) float32.
        factor: Factor of the tile.
        slope: (64,) float32, the step of each row's ramp.
        start: (64,) int32, what is multiplied by it in column 0.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        places = (start[:, None] + lax.broadcasted_iota(jnp.int32, tile.shape, 1)).astype(jnp.float32)
        return tile * jnp.float32(factor) + slope[:, None] * places
    result = held(tile.shape, TILE)

    @inline(TILE, ROW, ROW, result=result)
    def add(tile: Any, slope: Any, start: Any) -> Any:
        f32 = ir.F32Type.get()
        own = arith.muli(arith.remui(thread_of_warpgroup(), i32(4)), i32(2))
        first = [arith.sitofp(f32, arith.addi(number_of(start.registers.flat[half]), own)) for half in range(2)]
        steps, by = [number_of(slope.registers.flat[half]) for half in range(2)], mgpu.c(factor, f32)
        registers = tile.registers.copy()
        pairs = registers.reshape(registers.shape[1], 2)
        for j in range(pairs.shape[0]):
            for half in range(2):
                pair = pairs[j, half]
                for i in range(2):
                    place = elementwise("add.rn.f32 $0, $1, $2;", [first[half], mgpu.c(float(8 * j + i), f32)])
                    rise = elementwise("mul.rn.f32 $0, $1, $2;", [steps[half], place])
                    found = elementwise("fma.rn.f32 $0, $1, $2, $3;", [element(pair, i), by, rise])
                    pair = with_element(pair, i, found)
                pairs[j, half] = pair
        return fragmented(pairs.reshape(registers.shape), tile.layout, signed=tile.is_signed)

    return add(tile, slope, start)
