"""Quantisation of rows on a Hopper GPU: the formulas of `portable`, bit-identical unless functions are used."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ElementwiseContract,
    QuantizeContract,
    RowContract,
    honour,
    row_contract,
)
from pallas_kernels.parts.hopper.arithmetic import magnitude, silu
from pallas_kernels.parts.hopper.narrow import rounded_quotients
from pallas_kernels.parts.hopper.row import Row
from pallas_kernels.parts.hopper.row_engine import NEEDS, Picked, run_rows, supports
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.lanes import Arrays
from pallas_kernels.schedule.hopper.row_lanes import row_lanes

_SMALLEST: Final = np.finfo(np.float32).tiny


def _serves(x: Any, smooth: Any = None, place: Any = None, expert: Any = None, **_: Any) -> bool:
    del expert
    full = x.shape[0] > 0 or place is None
    return full and supports(x.shape[1], x.dtype, jnp.bfloat16, *([] if smooth is None else [smooth.dtype]))


def _serves_swiglu(x: Any, *others: Any, **named: Any) -> bool:
    return _serves(jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2), x.dtype), *others, **named)


@served_if(_serves, NEEDS)
def quantize(
    x: jax.Array,
    smooth: jax.Array | None = None,
    place: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    contract: QuantizeContract,
    interpret: Any = False,
) -> Arrays:
    """Bit-identical to `portable.quantize`; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant.
    """
    return _quantize([x], smooth, place, expert, contract, interpret)


@served_if(_serves_swiglu, NEEDS)
def quantize_swiglu(
    x: jax.Array,
    smooth: jax.Array | None = None,
    place: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    contract: QuantizeContract,
    functions: ElementwiseContract,
    interpret: Any = False,
) -> Arrays:
    """Computes `portable.quantize_swiglu` with the silu of `functions`.

    Guarantee: row-invariant.
    """
    honour("quantize_swiglu", functions, PTX_FUNCTIONS)
    # The two halves of a row are two rows of this array.
    halves = x.reshape(2 * x.shape[0], x.shape[1] // 2)
    return _quantize([halves, halves], smooth, place, expert, contract, interpret)


@served_if(
    lambda x, weight=None, smooth=None, *_, **__: supports(
        x.shape[1], x.dtype, jnp.bfloat16, *(v.dtype for v in (weight, smooth) if v is not None)
    ),
    NEEDS,
)
def quantize_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    smooth: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    quantize: QuantizeContract,
    interpret: Any = False,
) -> Arrays:
    """Bit-identical to `portable.quantize_norm`.

    Guarantee: row-invariant.
    """
    honour("quantize_norm", contract, row_contract())
    c, dtype = x.shape[1], x.dtype
    vectors = [v for v in (weight, smooth) if v is not None]
    rows = [x] if residual is None else [x, residual]

    def program(row: Row) -> None:
        if residual is not None:
            row.derive(lambda h, r: ((h + r).astype(dtype),))
        mean = row.quotient(row.fold(lambda h: row.product(h, h)), c)
        factor = row.quotient(1, row.square_root(mean + jnp.float32(eps)))

        def normal(h: jax.Array, *scales: jax.Array) -> Arrays:
            n = row.product(h, factor)
            for scale in scales:
                n = row.product(n, scale)
            return h.astype(dtype), n

        row.derive(normal, vectors=range(len(vectors)))
        largest = row.fold(lambda h, n: magnitude(n, interpret), combine="largest")
        scale = _scale(row, largest, quantize)
        row.put(0, scale)

        def narrowed(h: jax.Array, n: jax.Array) -> Arrays:
            y = rounded_quotients(n, scale, jnp.bool_(True), quantize, interpret)
            return (y,) if residual is None else (y, h)

        row.emit(narrowed, vectors=())

    results = [jnp.int8] if residual is None else [jnp.int8, dtype]
    y, *h, scale = run_rows(program, rows, vectors, results, numbers=1, interpret=interpret)
    return (_in_format(y, quantize), scale, *h)


def _quantize(
    rows: Sequence[jax.Array],
    smooth: jax.Array | None,
    place: jax.Array | None,
    expert: jax.Array | None,
    contract: QuantizeContract,
    interpret: Any,
) -> Arrays:
    """Quantises rows, or the SwiGLU of two consecutive rows of an array, times their smooth scales."""
    given = [a for a in (expert, place) if a is not None]
    parts = len(rows)

    def of_part(part: int) -> Any:
        def at(row: Row) -> Any:
            return (row.index if place is None else row.given(len(given) - 1)) * parts + part

        return at if place is not None or parts > 1 else None

    picked = [Picked(x, of_part(i)) for i, x in enumerate(rows)]
    vectors: list[jax.Array | Picked] = []
    if smooth is not None:
        vectors = [smooth if expert is None else Picked(smooth, lambda row: jnp.maximum(row.given(0), 0))]

    def program(row: Row) -> None:
        def columns(*a: jax.Array) -> Arrays:
            h = a[0] if parts == 1 else row.product(silu(a[0], interpret), a[1])
            return (h if smooth is None else row.product(h, a[-1]),)

        row.derive(columns, vectors=range(len(vectors)))
        scale = _scale(row, row.fold(lambda h: magnitude(h, interpret), combine="largest"), contract)
        used = jnp.bool_(True)
        if expert is None:
            row.put(0, scale)
        else:
            used = row.given(0) >= 0
            instead = jnp.where(row.given(0) == -1, jnp.float32(0), jnp.float32(jnp.nan))
            row.put(0, jnp.where(used, scale, instead))
        row.emit(lambda h: (rounded_quotients(h, scale, used, contract, interpret),), vectors=())

    count = rows[0].shape[0] // parts if place is None else place.shape[0]
    y, scale = run_rows(
        program,
        picked,
        vectors,
        [jnp.int8],
        given=given,
        numbers=1,
        count=count,
        lanes=row_lanes(count, rows[0].shape[1], [x.dtype.itemsize for x in rows]),
        interpret=interpret,
    )
    return _in_format(y, contract), scale


def _scale(row: Row, largest: jax.Array, contract: QuantizeContract) -> jax.Array:
    scale = row.quotient(largest, contract.largest)
    scale = jnp.where(scale < _SMALLEST, _SMALLEST, scale)
    return jnp.where(scale < jnp.inf, scale, jnp.float32(jnp.nan))


def _in_format(y: jax.Array, contract: QuantizeContract) -> jax.Array:
    return y if contract.format == "int8" else lax.bitcast_convert_type(y, contract.format)
