"""Sums of rows and over rows on a Hopper GPU, bit-identical to `portable`."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import ChunkContract, RowContract, honour, row_contract
from pallas_kernels.parts.hopper import batch_sum
from pallas_kernels.parts.hopper.row import Row
from pallas_kernels.parts.hopper.row_engine import run_rows, supports
from pallas_kernels.parts.served import served_if

_NEEDS: Final = "an axis of at least 128 elements, of whole 16 bytes"


def _sum_served(x: jax.Array, *, mean: bool = False, **_: Any) -> bool:
    # Across memory the portable program is memory-bound and has the same bits. Its quotients are not rounded like the
    # kernel's, so a mean always uses the kernel.
    return supports(x.shape[1], x.dtype) and (x.shape[2] == 1 or mean)


@served_if(_sum_served, _NEEDS)
def sum_axis(x: jax.Array, *, contract: RowContract, mean: bool = False, interpret: Any = False) -> jax.Array:
    """Bit-identical to `portable.sum_axis`; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant.
    """
    a, r, b = x.shape
    honour("sum_axis", contract, row_contract())

    def program(row: Row) -> None:
        row.put(0, _total(row, r if mean else None))

    return run_rows(program, [_as_rows(x)], numbers=1, interpret=interpret)[0].reshape(a, b)


@served_if(lambda x, *, ddof, **_: supports(x.shape[1], x.dtype) and x.shape[1] > ddof, _NEEDS)
def variance(x: jax.Array, *, ddof: int, contract: RowContract, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """Bit-identical to `portable.variance`.

    Guarantee: row-invariant.
    """
    a, r, b = x.shape
    honour("variance", contract, row_contract())

    def program(row: Row) -> None:
        mean = _total(row, r)

        def square(x: jax.Array) -> jax.Array:
            d = x - mean
            return row.product(d, d)

        row.put(0, row.quotient(row.fold(square), r - ddof))
        row.put(1, mean)

    y, mean = run_rows(program, [_as_rows(x)], numbers=2, interpret=interpret)
    return y.reshape(a, b), mean.reshape(a, b)


@served_if(
    lambda x, *, contract, **_: x.ndim == 2 and batch_sum.supports(x.shape[1], contract),
    "a matrix with rows of at least 128 columns",
)
def sum_rows(
    x: jax.Array, *, contract: ChunkContract, accumulate: jax.Array | None = None, interpret: Any = False
) -> jax.Array:
    """Bit-identical to `portable.sum_rows`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    return batch_sum.sum_chunks(lambda x: x, [x], accumulate, interpret=interpret)


def _as_rows(x: jax.Array) -> jax.Array:
    """(A, R, B) to (A * B, R)."""
    a, r, b = x.shape
    return x.transpose(0, 2, 1).reshape(a * b, r)


def _total(row: Row, count: int | None) -> jax.Array:
    """Adds the row, and divides by `count` if not None; a sum of zeros is +0."""
    total = row.fold(lambda x: x)
    total = jnp.where(total == 0, jnp.float32(0), total)
    return total if count is None else row.quotient(total, count)
