"""Masks of tiles: a range of columns in each row, as attention by positions keeps, and of these those with a bit."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, number_of, with_element
from pallas_kernels.parts.hopper.tile import ROW, TILE, i32, thread_of_warpgroup

WORD: Final = 32
"""Columns of a word of bits."""


def keep_band(
    tile: jax.Array,
    first: jax.Array | None,
    last: jax.Array,
    other: float,
    interpret: bool,
    words: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Returns a tile with `other` in each row's columns before `first`, after `last`, and without a bit.

    A thread compares its limits with constants, so that no mask takes registers.

    Args:
        tile: (64, n) float32.
        first: (64,) int32, or None if no column is before it.
        last: (64,) int32.
        other: What the other columns get.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        words: (64,) int32 for each 32 columns; column 32 w + i is bit i of word w. Without any, all have a bit.
    """
    if interpret:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        inside = column <= last[:, None]
        if first is not None:
            inside = inside & (column >= first[:, None])
        if words:
            bits = jnp.stack(words, axis=1)[:, :, None] >> lax.iota(jnp.int32, WORD) & 1
            inside = inside & (bits.reshape(tile.shape) != 0)
        return jnp.where(inside, tile, jnp.float32(other))
    result = held(tile.shape, TILE)
    edges = (last,) if first is None else (last, first)
    given = (*edges, *words)

    @inline(TILE, *[ROW] * len(given), result=result)
    def keep(tile: Any, *numbers: Any) -> Any:
        outside = mgpu.c(other, ir.F32Type.get())
        own = arith.muli(arith.remui(thread_of_warpgroup(), i32(4)), i32(2))
        numbers, bits = numbers[: len(edges)], numbers[len(edges) :]
        limits = [[arith.subi(number_of(x.registers.flat[half]), own) for half in range(2)] for x in numbers]
        moved = [[arith.shrui(number_of(x.registers.flat[half]), own) for half in range(2)] for x in bits]
        registers = tile.registers.copy()
        pairs = registers.reshape(registers.shape[1], 2)
        for j in range(pairs.shape[0]):
            for half in range(2):
                pair = pairs[j, half]
                for i in range(2):
                    at = i32(8 * j + i)
                    inside = arith.cmpi(arith.CmpIPredicate.sge, limits[0][half], at)
                    for least in limits[1:]:
                        inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.sle, least[half], at))
                    if bits:
                        bit = arith.andi(moved[8 * j // WORD][half], i32(1 << (8 * j % WORD + i)))
                        inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ne, bit, i32(0)))
                    pair = with_element(pair, i, arith.select(inside, element(pair, i), outside))
                pairs[j, half] = pair
        return fragmented(pairs.reshape(registers.shape), tile.layout, signed=tile.is_signed)

    return keep(tile, *given)
