"""The largest numbers of rows on an NVIDIA GPU: a block holds a row and repeatedly selects its largest number."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.pallas_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.pallas_triton.routing import topk_warps
from pallas_kernels.topk.order import in_order

_LEAST: Final = -(2**31)  # below -inf
_WIDEST: Final = 4096
_MOST: Final = 64


def _serves(x: Any, *, number: int, **_: Any) -> bool:
    return x.shape[0] > 0 and 0 < number <= _MOST and x.shape[1] <= _WIDEST and x.size < 1 << 31


@served_if(_serves, f"at least one row, of at most {_WIDEST} columns, and at most {_MOST} of them")
@in_32_bits
def largest(x: jax.Array, *, number: int, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Equal to `portable.largest`; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant: nothing is rounded.

    Example:
        >>> places, numbers = largest(jnp.array([[0.0, 2.0, 2.0, 1.0]]), number=3, interpret=True)
        >>> places.tolist(), numbers.tolist()
        ([[1, 2, 3]], [[2.0, 2.0, 1.0]])
    """
    rows, width = x.shape

    def kernel(x: Any, places: Any, numbers: Any) -> None:
        row = pl.program_id(0)
        column = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(width),), 0)
        slot = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(number),), 0)
        there = column < width
        read = plt.load(x.at[row * width + jnp.where(there, column, 0)], mask=there, other=0)
        order = jnp.where(there, in_order(read.astype(jnp.float32)), _LEAST)

        def take(i: Any, carry: Any) -> Any:
            order, found = carry
            place = jnp.min(jnp.where(order == jnp.max(order), column, width))
            return jnp.where(column == place, _LEAST, order), jnp.where(slot == i, place, found)

        _, found = lax.fori_loop(0, number, take, (order, jnp.zeros_like(slot)))
        wanted = slot < number
        chosen = plt.load(x.at[row * width + found], mask=wanted, other=0).astype(jnp.float32)
        plt.store(places.at[row * number + slot], found, mask=wanted)
        plt.store(numbers.at[row * number + slot], chosen, mask=wanted)

    flat = (rows * number,)
    places, numbers = launch(
        kernel,
        x.reshape(-1),
        blocks=rows,
        out=[jax.ShapeDtypeStruct(flat, jnp.int32), jax.ShapeDtypeStruct(flat, jnp.float32)],
        warps=topk_warps(width),
        stages=1,
        interpret=interpret,
    )
    return places.reshape(rows, number), numbers.reshape(rows, number)
