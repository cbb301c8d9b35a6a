"""The weighted sum of each token's rows on a Hopper GPU: all of them are read by the block that adds them."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.parts.hopper.arithmetic import columns_of
from pallas_kernels.parts.hopper.row import Row
from pallas_kernels.parts.hopper.row_engine import Picked, run_rows, supports
from pallas_kernels.parts.no_row import WRONG
from pallas_kernels.parts.xla.lanes import Arrays
from pallas_kernels.schedule.hopper.rows import RowSchedule

_MOST: Final = 16
"""Rows of a token: a thread has some columns of each in flight."""

# The product, or zero without a row, whatever the arbitrary row that is read instead holds.
_WEIGHTED: Final = (
    "{ .reg .pred p; .reg .f32 t; setp.neu.f32 p, $3, 0f00000000; mul.rn.f32 t, $1, $2; selp.f32 $0, t, 0f00000000, p; }"
)
# Zeros lose their sign; nan for a wrong row.
_FINISHED: Final = (
    "{ .reg .pred p, q; .reg .f32 t; setp.eq.f32 p, $1, 0f00000000; selp.f32 t, 0f00000000, $1, p;"
    " setp.neu.f32 q, $2, 0f00000000; selp.f32 $0, 0f7FC00000, t, q; }"
)


def serves(rows: Any, place: Any, *_: Any, dtype: str, **__: Any) -> bool:
    """Whether the kernel serves rows (R, C) and places (T, topk)."""
    full = min(rows.shape[0], place.shape[0], place.shape[1]) > 0
    return full and place.shape[1] <= _MOST and supports(rows.shape[1], rows.dtype, jnp.dtype(dtype))


def combine_rows(
    rows: jax.Array,
    place: jax.Array,
    weights: jax.Array,
    *,
    dtype: str,
    interpret: Any = False,
    lanes: int = 1024,
    schedule: RowSchedule | None = None,
) -> jax.Array:
    """Adds the rows of each token, each times its weight, in float32 and in the order of its places.

    Args:
        rows: (R, C), at least one.
        place: (T, topk) int32, the row of each of a token's experts; -1 for none, which counts as zero, and -2 for a
            wrong one, which makes the token nan.
        weights: (T, topk) float32.
        dtype: Dtype of the result; the sum is rounded once, and is +0 rather than -0.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (T, C).

    Guarantee: row-invariant.
    """
    topk = place.shape[1]

    def of_rank(rank: int, row: Row) -> Any:
        return jnp.maximum(row.given(0, rank), 0)

    def program(row: Row) -> None:
        places = [row.given(0, i) for i in range(topk)]
        scales = [(row.given(1, i), jnp.where(p >= 0, jnp.float32(1), jnp.float32(0))) for i, p in enumerate(places)]
        wrong = functools.reduce(jnp.maximum, [jnp.where(p == WRONG, jnp.float32(1), jnp.float32(0)) for p in places])

        def add(*columns: jax.Array) -> Arrays:
            terms = [_weighted(x, w, used, interpret) for x, (w, used) in zip(columns, scales, strict=True)]
            return (_finished(functools.reduce(lambda a, b: a + b, terms), wrong, interpret),)

        row.emit(add)

    return run_rows(
        program,
        [Picked(rows, functools.partial(of_rank, i)) for i in range(topk)],
        results=[jnp.dtype(dtype)],
        given=[place, weights],
        count=place.shape[0],
        lanes=lanes,
        interpret=interpret,
        schedule=schedule,
        name="combine_rows",
    )[0]


def _weighted(x: jax.Array, weight: jax.Array, used: jax.Array, interpret: Any) -> jax.Array:
    if not interpret:
        return columns_of(_WEIGHTED, [x, weight, used])
    return jax.lax.optimization_barrier(jnp.where(used != 0, x * weight, jnp.float32(0)))


def _finished(total: jax.Array, wrong: jax.Array, interpret: Any) -> jax.Array:
    if not interpret:
        return columns_of(_FINISHED, [total, wrong])
    return jnp.where(wrong != 0, jnp.float32(np.nan), jnp.where(total == 0, jnp.float32(0), total))
