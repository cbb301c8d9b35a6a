"""Picking rows by number on a Hopper GPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import PTX_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.parts.hopper.row_engine import NEEDS, Picked, Row, run_rows, supports
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.hopper.rows import row_lanes


@served_if(lambda x, place, **_: x.shape[0] > 0 and supports(x.shape[1], x.dtype), NEEDS)
def pick_rows(
    x: jax.Array, place: jax.Array, *, functions: ElementwiseContract = PTX_FUNCTIONS, interpret: Any = False
) -> jax.Array:
    """Returns what `portable.pick_rows` returns; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant: a copy is exact.
    """
    honour("pick_rows", functions, PTX_FUNCTIONS)
    # As integers, of which no instruction changes a bit.
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    source = Picked(bits, lambda row: jnp.maximum(row.given(0), 0))

    def program(row: Row) -> None:
        row.copy(row.given(0) >= 0)

    (y,) = run_rows(
        program,
        [source],
        results=[bits.dtype],
        given=[place],
        count=place.shape[0],
        lanes=row_lanes(place.shape[0], x.shape[1], [x.dtype.itemsize]),
        interpret=interpret,
    )
    return lax.bitcast_convert_type(y, x.dtype)
