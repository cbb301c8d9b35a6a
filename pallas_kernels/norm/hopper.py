"""Norms of rows and their gradients on a Hopper GPU, bit-identical to `portable`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import ChunkContract, RowContract, chunk_contract, honour, row_contract
from pallas_kernels.parts.hopper import batch_sum
from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, product
from pallas_kernels.parts.hopper.row import Row
from pallas_kernels.parts.hopper.row_engine import NEEDS, Companion, run_rows, supports
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.lanes import Arrays
from pallas_kernels.schedule.hopper.batch_sum import PARTS
from pallas_kernels.schedule.hopper.norm_gradients import GradientsSchedule, gradients_schedule


def _rows_served(rows: jax.Array, *arrays: jax.Array | None) -> bool:
    return supports(rows.shape[1], rows.dtype, *(a.dtype for a in arrays if a is not None))


@served_if(lambda x, weight=None, residual=None, **_: _rows_served(x, weight), NEEDS)
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    dtype: str | None = None,
    contract: RowContract,
    interpret: Any = False,
) -> Arrays:
    """Bit-identical to `portable.rms_norm`; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant.
    """
    c = x.shape[1]
    vectors = [] if weight is None else [weight]
    honour("rms_norm", contract, row_contract())

    def rounded(h: jax.Array) -> jax.Array:
        return h.astype(x.dtype).astype(jnp.float32)

    def total(h: jax.Array, added: Sequence[jax.Array]) -> jax.Array:
        if residual is None:
            return h
        return rounded(h + (added[0] if residual.dtype == x.dtype else rounded(added[0])))

    rows = [x] if residual is None else [x, residual]
    results = [x.dtype if dtype is None else jnp.dtype(dtype), x.dtype][: len(rows)]

    def program(row: Row) -> None:
        def square(*columns: jax.Array) -> jax.Array:
            h = total(columns[0], columns[1:])
            return row.product(h, h)

        factor = _reciprocal_root(row, row.fold(square), c, eps)
        row.put(0, factor)

        def scaled(*columns: jax.Array) -> Arrays:
            h = total(columns[0], columns[1 : len(rows)])
            y = _times(row, row.product(h, factor), columns[len(rows) :], offset)
            return (y,) if residual is None else (y, h)

        row.emit(scaled)

    plain = residual is None
    y, *h, factor = run_rows(program, rows, vectors, results, numbers=1, interpret=interpret, plain=plain)
    return (y, factor, *h)


@served_if(lambda h, factor, g, weight=None, g_sum=None, **_: _rows_served(h, g, weight), NEEDS)
def rms_norm_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    g_sum: jax.Array | None = None,
    *,
    offset: float = 0.0,
    contract: RowContract,
    interpret: Any = False,
) -> Arrays:
    """Bit-identical to `portable.rms_norm_gradient`.

    Guarantee: row-invariant.
    """
    vectors = [] if weight is None else [weight]
    honour("rms_norm_gradient", contract, row_contract())
    rows = [h, g] if g_sum is None else [h, g, g_sum]
    program = _gradient_of_rms_norm(h.shape[1], len(vectors), len(rows), offset)
    return run_rows(program, rows, vectors, [h.dtype], given=[factor], interpret=interpret)


def _gradients_served(
    h: jax.Array, factor: jax.Array, g: jax.Array, weight: jax.Array, g_sum: jax.Array | None = None,
    *, chunks: ChunkContract, **_: Any,
) -> bool:  # fmt: skip
    return _rows_served(h, g, weight, g_sum) and batch_sum.supports(h.shape[1], chunks)


@served_if(_gradients_served, NEEDS)
def rms_norm_gradients(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array,
    g_sum: jax.Array | None = None,
    *,
    offset: float = 0.0,
    dtype: str = "float32",
    contract: RowContract,
    chunks: ChunkContract,
    interpret: Any = False,
    schedule: GradientsSchedule | None = None,
) -> Arrays:
    """Returns the results of `rms_norm_gradient` and of `weight_gradient`, which read the same rows, in one launch.

    Guarantee: row-invariant; the gradient of the weight is split-invariant, for cuts at multiples of `chunks.rows`.
    """
    m, c = h.shape
    honour("rms_norm_gradients", contract, row_contract())
    honour("rms_norm_gradients", chunks, chunk_contract())
    rows = [h, g] if g_sum is None else [h, g, g_sum]
    if schedule is None:
        schedule = gradients_schedule(m, c, (h.dtype.itemsize, g.dtype.itemsize))
        if schedule is None:
            raise ValueError(f"expected rows that `gradients_schedule` serves, got {m} of {c} columns.")
    row_schedule, strips = schedule
    count, across = -(-m // chunks.rows), -(-c // (WARPGROUP * strips.neighbours))
    parts = PARTS if strips.apart else 1
    out = jax.ShapeDtypeStruct((count * parts, c), jnp.float32 if count * parts > 1 else jnp.dtype(dtype))
    add_chunk = batch_sum.chunk_body(_weight_step(interpret), m, c, out.dtype, strips, interpret)
    add_part = batch_sum.part_body(_weight_step(interpret), m, c, strips, interpret)

    def add(group: Any, number: Any, arrays: Any, sums: Any, *memory: Any) -> None:
        if strips.apart:
            add_part(group, number, *arrays, sums)
            return
        strip, warpgroup = lax.div(number, strips.warpgroups), lax.rem(number, strips.warpgroups)
        add_chunk(group, strip, warpgroup, *arrays, (), sums, *memory)

    companion = Companion(
        rows=chunks.rows // parts,
        apart=parts,
        blocks=-(-across // row_schedule.members) if strips.apart else across,
        warpgroups=strips.warpgroups,
        arrays=([h, g], [factor]),
        out=out,
        memory=batch_sum.chunk_memory(strips),
        body=add,
    )
    dh, sums = run_rows(
        _gradient_of_rms_norm(c, 1, len(rows), offset),
        rows,
        [weight],
        [h.dtype],
        given=[factor],
        interpret=interpret,
        schedule=row_schedule,
        name="rms_norm_gradients",
        companion=companion,
    )
    if len(sums) == 1:
        return dh, sums.reshape(c)
    return dh, batch_sum.add_upwards(sums, [], jnp.dtype(dtype), interpret, parts=parts)


def _gradient_of_rms_norm(columns: int, vectors: int, rows: int, offset: float) -> Callable[[Row], None]:
    """Returns the row program of the gradient of rms_norm; with three rows the last is added to it."""

    def program(row: Row) -> None:
        factor = row.given(0)

        def parts(columns: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return row.product(columns[0], factor), _times(row, columns[1], columns[rows:], offset)

        def product(*columns: jax.Array) -> jax.Array:
            normal, gw = parts(columns)
            return row.product(gw, normal)

        mean = row.quotient(row.fold(product, vectors=range(vectors)), columns)

        def gradient(*columns: jax.Array) -> Arrays:
            normal, gw = parts(columns)
            dh = row.product(gw - row.product(normal, mean), factor)
            return (dh if rows == 2 else dh + columns[2],)

        row.emit(gradient)

    return program


@served_if(lambda x, weight=None, bias=None, **_: _rows_served(x, weight, bias), NEEDS)
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    interpret: Any = False,
) -> Arrays:
    """Bit-identical to `portable.layer_norm`.

    Guarantee: row-invariant.
    """
    c = x.shape[1]
    vectors = [v for v in (weight, bias) if v is not None]
    honour("layer_norm", contract, row_contract())

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

    return run_rows(program, [x], vectors, [x.dtype], numbers=2, interpret=interpret, plain=True)


@served_if(lambda x, mean, factor, g, weight=None, **_: _rows_served(x, g, weight), NEEDS)
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
    """Bit-identical to `portable.layer_norm_gradient`.

    Guarantee: row-invariant.
    """
    c = x.shape[1]
    vectors = [] if weight is None else [weight]
    honour("layer_norm_gradient", contract, row_contract())

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


@served_if(lambda h, *_, contract, **__: batch_sum.supports(h.shape[1], contract), "rows of at least 128 columns")
def weight_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    mean: jax.Array | None = None,
    *,
    contract: ChunkContract,
    dtype: str = "float32",
    interpret: Any = False,
) -> jax.Array:
    """Bit-identical to `portable.weight_gradient`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    given = [factor] if mean is None else [factor, mean]
    return batch_sum.sum_chunks(_weight_step(interpret), [h, g], given=given, dtype=dtype, interpret=interpret)


def _weight_step(interpret: Any) -> Callable[..., jax.Array]:
    def part(h: jax.Array, g: jax.Array, factor: jax.Array, *mean: jax.Array) -> jax.Array:
        normal = product(h - mean[0] if mean else h, factor, interpret)
        return product(g, normal, interpret)

    return part


def _times(row: Row, y: jax.Array, weight: Sequence[jax.Array], offset: float = 0.0) -> jax.Array:
    """Multiplies columns by the weight plus the offset, or by the one of them that there is."""
    if not weight:
        return row.product(y, jnp.float32(offset)) if offset else y
    return row.product(y, weight[0] + jnp.float32(offset) if offset else weight[0])


def _reciprocal_root(row: Row, total: jax.Array, columns: int, eps: float) -> jax.Array:
    return row.quotient(1, row.square_root(row.quotient(total, columns) + jnp.float32(eps)))
