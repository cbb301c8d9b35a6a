"""Masks of tiles that keep a range of columns in each row, as attention by positions does."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.parts.hopper.registers import element, number_of, with_element
from pallas_kernels.parts.hopper.tile import ROW, TILE, i32, thread_of_warpgroup


def keep_band(tile: jax.Array, first: jax.Array | None, last: jax.Array, other: float, interpret: bool) -> jax.Array:
    """Returns a tile with `other` in the columns before `first` and behind `last` of each row.

    A thread compares its limits with constants, so that no mask takes registers.

    Args:
        tile: (64, n) float32.
        first: (64,) int32, or None if no column is before it.
        last: (64,) int32.
        other: What the other columns get.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    if interpret:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        inside = column <= last[:, None]
        if first is not None:
            inside = inside & (column >= first[:, None])
        return jnp.where(inside, tile, jnp.float32(other))
    result = plgpu.ShapeDtypeStruct(tile.shape, jnp.dtype(jnp.float32), layout=TILE)
    given = (last,) if first is None else (last, first)
    inline: Any = plgpu.inline_mgpu(arg_types=(TILE, *[ROW] * len(given)), return_type=result)

    @inline  # type: ignore[untyped-decorator]
    def keep(_: Any, tile: Any, *numbers: Any) -> Any:
        outside = mgpu.c(other, ir.F32Type.get())
        own = arith.muli(arith.remui(thread_of_warpgroup(), i32(4)), i32(2))
        limits = [[arith.subi(number_of(x.registers.flat[half]), own) for half in range(2)] for x in numbers]
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
                    pair = with_element(pair, i, arith.select(inside, element(pair, i), outside))
                pairs[j, half] = pair
        return mgpu.FragmentedArray(
            _registers=pairs.reshape(registers.shape), _layout=tile.layout, _is_signed=tile.is_signed
        )

    kept: jax.Array = keep(tile, *given)
    return kept
