"""Sums of rows and over rows on NVIDIA GPUs from Ampere on, by Triton kernels with the bits of `portable`."""

from typing import Any

import jax

from pallas_kernels.contract import ChunkContract, RowContract, honour, row_contract
from pallas_kernels.parts.jax_triton.chunk_launch import chunks_served, sum_chunks
from pallas_kernels.parts.jax_triton.row_launch import DTYPES, NEEDS, launch_rows, number_of_each, rows_served
from pallas_kernels.parts.served import served_if
from pallas_kernels.rows.jax_triton.kernels import sum_chunk_kernel, sum_kernel, variance_kernel
from pallas_kernels.schedule.jax_triton.batch_sum import ChunkSchedule
from pallas_kernels.schedule.jax_triton.rows import RowSchedule
from pallas_kernels.target import Target


def _sum_served(x: jax.Array, *, mean: bool = False, **_: Any) -> bool:
    # Across memory the portable program has the bits of the sum, but rounds quotients otherwise: a mean always uses
    # the kernel, as the number of columns may depend on the batch.
    return x.dtype.name in DTYPES and 0 not in x.shape and (x.shape[2] == 1 or mean)


@served_if(_sum_served, "(A, R, 1) of float32, bfloat16 or float16, or (A, R, B) for a mean, with no empty dimension")
def sum_axis(
    x: jax.Array, *, contract: RowContract, target: Target, mean: bool = False, schedule: RowSchedule | None = None
) -> jax.Array:
    """Bit-identical to `portable.sum_axis`, whose quotients are rounded correctly on a CPU only.

    Guarantee: row-invariant.
    """
    honour("sum_axis", contract, row_contract())
    rows = _as_rows(x)
    (total,) = launch_rows(sum_kernel, rows, [], [number_of_each(rows)], target, schedule, DIVIDED=mean)
    return total.reshape(x.shape[0], x.shape[2])


@served_if(
    lambda x, *, ddof, **_: x.dtype.name in DTYPES and 0 not in x.shape and x.shape[1] > ddof,
    "(A, R, B) of float32, bfloat16 or float16, with no empty dimension, and more elements R than `ddof`",
)
def variance(
    x: jax.Array, *, ddof: int, contract: RowContract, target: Target, schedule: RowSchedule | None = None
) -> tuple[jax.Array, jax.Array]:
    """Bit-identical to `portable.variance`, whose quotients are rounded correctly on a CPU only.

    Guarantee: row-invariant.
    """
    honour("variance", contract, row_contract())
    rows = _as_rows(x)
    out = [number_of_each(rows)] * 2
    found = launch_rows(variance_kernel, rows, [], out, target, schedule, DIVISOR=rows.shape[1] - ddof)
    value, mean = (a.reshape(x.shape[0], x.shape[2]) for a in found)
    return value, mean


@served_if(lambda x, *, contract, **_: rows_served(x) and chunks_served(contract), f"{NEEDS}, in chunks of 128 rows")
def sum_rows(
    x: jax.Array,
    *,
    contract: ChunkContract,
    target: Target,
    accumulate: jax.Array | None = None,
    schedule: ChunkSchedule | None = None,
) -> jax.Array:
    """Bit-identical to `portable.sum_rows`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    honour("sum_rows", contract, ChunkContract())
    return sum_chunks(sum_chunk_kernel, x, [], accumulate, target, schedule)


def _as_rows(x: jax.Array) -> jax.Array:
    """(A, R, B) to (A * B, R)."""
    a, r, b = x.shape
    return x.transpose(0, 2, 1).reshape(a * b, r)
