"""The largest numbers of rows on NVIDIA GPUs from Ampere on."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.schedule.jax_triton.routing import topk_tile
from pallas_kernels.target import Target
from pallas_kernels.topk.jax_triton.kernels import largest_kernel

_WIDEST: Final = 4096
_MOST: Final = 64


def _serves(x: Any, *, number: int, **_: Any) -> bool:
    return x.shape[0] > 0 and 0 < number <= _MOST and x.shape[1] <= _WIDEST and x.size < 1 << 31


@served_if(_serves, f"at least one row, of at most {_WIDEST} columns, and at most {_MOST} of them")
@in_32_bits
def largest(x: jax.Array, *, number: int, target: Target) -> tuple[jax.Array, jax.Array]:
    """Equal to `portable.largest`.

    Guarantee: row-invariant: nothing is rounded.
    """
    rows, width = x.shape
    tile = topk_tile(width)
    places, numbers = launch(
        largest_kernel,
        x,
        target=target,
        out=[jax.ShapeDtypeStruct((rows, number), jnp.int32), jax.ShapeDtypeStruct((rows, number), jnp.float32)],
        grid=(rows,),
        warps=tile.warps,
        stages=1,
        fuses=False,
        constants={
            "WIDTH": width,
            "COLUMNS": tile.columns,
            "PARTS": tile.parts,
            "NUMBER": number,
            "SLOTS": next_power_of_two(number),
        },
    )
    return places, numbers
