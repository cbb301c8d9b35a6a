"""Picking rows by number on NVIDIA GPUs from Ampere on."""

from typing import Any

import jax

from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.pick.jax_triton.kernels import pick_kernel
from pallas_kernels.schedule.jax_triton.routing import COPIED, copies_rows, copy_warps, piece_columns, pieces_at_once
from pallas_kernels.target import Target


def _serves(x: Any, place: Any, *_: Any, **__: Any) -> bool:
    return x.dtype.name in COPIED and place.shape[0] > 0 and copies_rows(x.shape[1], x.dtype.itemsize)


@served_if(_serves, "float32, bfloat16, float16 or int8 rows that a power of two of at least 32 columns divides")
@in_32_bits
def pick_rows(x: jax.Array, place: jax.Array, order: jax.Array | None = None, *, target: Target) -> jax.Array:
    """Equal to `portable.pick_rows`, except rows that nobody reads.

    Guarantee: row-invariant: a copy is exact.
    """
    columns, itemsize = x.shape[1], x.dtype.itemsize
    (out,) = launch(
        pick_kernel,
        x,
        place,
        place if order is None else order,  # an absent one is not read
        target=target,
        out=[jax.ShapeDtypeStruct((place.shape[0], columns), x.dtype)],
        grid=(place.shape[0],),
        warps=copy_warps(columns, itemsize),
        stages=1,
        fuses=False,
        constants={
            "COLUMNS": columns,
            "PIECE": piece_columns(columns, itemsize),
            "GROUP": pieces_at_once(columns, itemsize),
            "HAS_ORDER": order is not None,
        },
    )
    return out
