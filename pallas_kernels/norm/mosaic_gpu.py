"""Norms of rows and their gradients on a Hopper GPU: the formulas and the bits of `pallas_kernels.norm.tiled`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic_chunks
from pallas_kernels._lanes import Arrays
from pallas_kernels._mosaic_arithmetic import product
from pallas_kernels._mosaic_rows import Row, run_rows, supports
from pallas_kernels.contract import ChunkContract, RowContract
from pallas_kernels.norm import tiled


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    interpret: Any = False,
) -> Arrays:
    """Returns what `tiled.rms_norm` returns, with its bits; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant.
    """
    c, dtype = x.shape[1], x.dtype
    vectors = [] if weight is None else [weight]
    if not _supported(c, contract, x, *vectors):
        return tiled.rms_norm(x, weight, residual, eps=eps, contract=contract)

    def total(h: jax.Array, residual: Sequence[jax.Array]) -> jax.Array:
        return (h + residual[0]).astype(dtype).astype(jnp.float32) if residual else h

    rows = [x] if residual is None else [x, residual]

    def program(row: Row) -> None:
        def square(*columns: jax.Array) -> jax.Array:
            h = total(columns[0], columns[1:])
            return row.product(h, h)

        factor = _reciprocal_root(row, row.fold(square), c, eps)
        row.put(0, factor)

        def scaled(*columns: jax.Array) -> Arrays:
            h = total(columns[0], columns[1 : len(rows)])
            y = _times(row, row.product(h, factor), columns[len(rows) :])
            return (y,) if residual is None else (y, h)

        row.emit(scaled)

    y, *h, factor = run_rows(program, rows, vectors, [dtype] * len(rows), numbers=1, interpret=interpret)
    return (y, factor, *h)


def rms_norm_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    g_sum: jax.Array | None = None,
    *,
    contract: RowContract,
    interpret: Any = False,
) -> Arrays:
    """Returns what `tiled.rms_norm_gradient` returns, with its bits.

    Guarantee: row-invariant.
    """
    c = h.shape[1]
    vectors = [] if weight is None else [weight]
    if not _supported(c, contract, h, g, *vectors):
        return tiled.rms_norm_gradient(h, factor, g, weight, g_sum, contract=contract)
    rows = [h, g] if g_sum is None else [h, g, g_sum]

    def program(row: Row) -> None:
        factor = row.given(0)

        def parts(columns: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return row.product(columns[0], factor), _times(row, columns[1], columns[len(rows) :])

        def product(*columns: jax.Array) -> jax.Array:
            normal, gw = parts(columns)
            return row.product(gw, normal)

        mean = row.quotient(row.fold(product, vectors=range(len(vectors))), c)

        def gradient(*columns: jax.Array) -> Arrays:
            normal, gw = parts(columns)
            dh = row.product(gw - row.product(normal, mean), factor)
            return (dh if g_sum is None else dh + columns[2],)

        row.emit(gradient)

    return run_rows(program, rows, vectors, [h.dtype], given=[factor], interpret=interpret)


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    interpret: Any = False,
) -> Arrays:
    """Returns what `tiled.layer_norm` returns, with its bits.

    Guarantee: row-invariant.
    """
    c = x.shape[1]
    vectors = [v for v in (weight, bias) if v is not None]
    if not _supported(c, contract, x, *vectors):
        return tiled.layer_norm(x, weight, bias, eps=eps, contract=contract)

    def program(row: Row) -> None:
        mean = row.quotient(row.fold(lambda x: x), c)

        def square(x: jax.Array) -> jax.Array:
            d = x - mean
            return row.product(d, d)

        factor = _reciprocal_root(row, row.fold(square), c, eps)
        row.put(0, mean)
        row.put(1, factor)

        def scaled(x: jax.Array, *shared: jax.Array) -> Arrays:
            y = _times(row, row.product(x - mean, factor), shared[: weight is not None])
            return (y if bias is None else y + shared[-1],)

        row.emit(scaled)

    return run_rows(program, [x], vectors, [x.dtype], numbers=2, interpret=interpret)


def layer_norm_gradient(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    *,
    contract: RowContract,
    interpret: Any = False,
) -> Arrays:
    """Returns what `tiled.layer_norm_gradient` returns, with its bits.

    Guarantee: row-invariant.
    """
    c = x.shape[1]
    vectors = [] if weight is None else [weight]
    if not _supported(c, contract, x, g, *vectors):
        return tiled.layer_norm_gradient(x, mean, factor, g, weight, contract=contract)

    def program(row: Row) -> None:
        mean, factor = row.given(0), row.given(1)

        def parts(x: jax.Array, g: jax.Array, *shared: jax.Array) -> tuple[jax.Array, jax.Array]:
            return row.product(x - mean, factor), _times(row, g, shared)

        def sums(*columns: jax.Array) -> Arrays:
            normal, gw = parts(*columns)
            return row.product(gw, normal), gw

        totals = row.fold(sums, combine=("add", "add"), vectors=range(len(vectors)))
        mean_product, mean_gw = (row.quotient(total, c) for total in totals)

        def gradient(*columns: jax.Array) -> Arrays:
            normal, gw = parts(*columns)
            return (row.product(gw - mean_gw - row.product(normal, mean_product), factor),)

        row.emit(gradient)

    return run_rows(program, [x, g], vectors, [x.dtype], given=[mean, factor], interpret=interpret)


def weight_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    mean: jax.Array | None = None,
    *,
    contract: ChunkContract,
    interpret: Any = False,
) -> jax.Array:
    """Returns what `tiled.weight_gradient` returns, with its bits.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    if not _mosaic_chunks.supports(h.shape[1], contract):
        return tiled.weight_gradient(h, factor, g, mean, contract=contract)

    def part(h: jax.Array, g: jax.Array, factor: jax.Array, *mean: jax.Array) -> jax.Array:
        normal = product(h - mean[0] if mean else h, factor, interpret)
        return product(g, normal, interpret)

    given = [factor] if mean is None else [factor, mean]
    return _mosaic_chunks.sum_chunks(part, [h, g], given=given, interpret=interpret)


def _supported(columns: int, contract: RowContract, *arrays: jax.Array) -> bool:
    return contract == RowContract() and supports(columns, *(a.dtype for a in arrays))


def _times(row: Row, y: jax.Array, weight: Sequence[jax.Array]) -> jax.Array:
    return row.product(y, weight[0]) if weight else y


def _reciprocal_root(row: Row, total: jax.Array, columns: int, eps: float) -> jax.Array:
    return row.quotient(1, row.square_root(row.quotient(total, columns) + jnp.float32(eps)))
