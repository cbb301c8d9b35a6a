"""Sums of rows and over rows on a Hopper GPU: the orders of `pallas_kernels.rows.tiled`, with the same bits."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic_chunks
from pallas_kernels._mosaic_rows import Row, run_rows, supports
from pallas_kernels.contract import ChunkContract, RowContract
from pallas_kernels.rows import tiled


def sum_axis(x: jax.Array, *, contract: RowContract, mean: bool = False, interpret: Any = False) -> jax.Array:
    """Returns what `tiled.sum_axis` returns, with its bits; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant.
    """
    a, r, b = x.shape
    # Across memory the portable form adds as fast as it reads, to the same bits; its quotients are not rounded here
    # as the kernel's are, so a mean goes through the kernel wherever its elements lie.
    if not _supported(x, contract) or (b > 1 and not mean):
        return tiled.sum_axis(x, contract=contract, mean=mean)

    def program(row: Row) -> None:
        row.put(0, _total(row, r if mean else None))

    return run_rows(program, [_as_rows(x)], numbers=1, interpret=interpret)[0].reshape(a, b)


def variance(x: jax.Array, *, ddof: int, contract: RowContract, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """Returns what `tiled.variance` returns, with its bits.

    Guarantee: row-invariant.
    """
    a, r, b = x.shape
    if not _supported(x, contract) or r <= ddof:
        return tiled.variance(x, ddof=ddof, contract=contract)

    def program(row: Row) -> None:
        mean = _total(row, r)

        def square(x: jax.Array) -> jax.Array:
            d = x - mean
            return row.product(d, d)

        row.put(0, row.quotient(row.fold(square), r - ddof))
        row.put(1, mean)

    y, mean = run_rows(program, [_as_rows(x)], numbers=2, interpret=interpret)
    return y.reshape(a, b), mean.reshape(a, b)


def sum_rows(
    x: jax.Array, *, contract: ChunkContract, accumulate: jax.Array | None = None, interpret: Any = False
) -> jax.Array:
    """Returns what `tiled.sum_rows` returns, with its bits.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    if x.ndim != 2 or not _mosaic_chunks.supports(x.shape[1], contract):
        return tiled.sum_rows(x, contract=contract, accumulate=accumulate)
    return _mosaic_chunks.sum_chunks(lambda x: x, [x], accumulate, interpret=interpret)


def _supported(x: jax.Array, contract: RowContract) -> bool:
    return contract == RowContract() and supports(x.shape[1], x.dtype)


def _as_rows(x: jax.Array) -> jax.Array:
    """(A, R, B) to (A * B, R)."""
    a, r, b = x.shape
    return x.transpose(0, 2, 1).reshape(a * b, r)


def _total(row: Row, count: int | None) -> jax.Array:
    """Adds up the row, and divides by `count` if there is one; a sum of zeros is +0."""
    total = row.fold(lambda x: x)
    total = jnp.where(total == 0, jnp.float32(0), total)
    return total if count is None else row.quotient(total, count)
