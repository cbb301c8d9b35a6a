"""Picking rows by number on an NVIDIA GPU: a block copies a row, in pieces that are loaded concurrently."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.pallas_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.pick.filled import filled
from pallas_kernels.schedule.pallas_triton.routing import copies_rows, copy_warps, piece_columns

_COPIED: Final = ("float32", "bfloat16", "float16", "int8")


def _serves(x: Any, place: Any, *_: Any, **__: Any) -> bool:
    small = max(x.shape[0], place.shape[0]) * x.shape[1] < 1 << 31
    return x.dtype.name in _COPIED and place.shape[0] > 0 and copies_rows(x.shape[1], x.dtype.itemsize) and small


@served_if(_serves, "float32, bfloat16, float16 or int8 rows that a power of two of at least 32 columns divides")
@in_32_bits
def pick_rows(x: jax.Array, place: jax.Array, order: jax.Array | None = None, *, interpret: bool = False) -> jax.Array:
    """Equal to `portable.pick_rows`; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant: a copy is exact.

    Example:
        >>> x = jnp.arange(1, 65, dtype=jnp.float32).reshape(2, 32)
        >>> pick_rows(x, jnp.array([[1], [-1], [0]]), interpret=True)[:, 0].tolist()
        [33.0, 0.0, 1.0]
    """
    rows, columns = place.shape[0], x.shape[1]
    piece = piece_columns(columns, x.dtype.itemsize)
    firsts = range(0, columns, piece)

    def kernel(x: Any, place: Any, *rest: Any) -> None:
        *given, out = rest
        row = pl.program_id(0)
        for order in given:
            row = order[row, 0]
        at = place[row, 0]
        source = jnp.maximum(at, 0)
        pieces = [plt.load(x.at[source, pl.ds(first, piece)]) for first in firsts]
        for first, columns in zip(firsts, pieces, strict=True):
            plt.store(out.at[row, pl.ds(first, piece)], filled(columns, at))

    (out,) = launch(
        kernel,
        x,
        place,
        *(() if order is None else (order,)),
        blocks=rows,
        out=[jax.ShapeDtypeStruct((rows, columns), x.dtype)],
        warps=copy_warps(columns, x.dtype.itemsize),
        stages=1,
        interpret=interpret,
    )
    return out
