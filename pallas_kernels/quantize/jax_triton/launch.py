"""Quantisation of rows on NVIDIA GPUs from Ampere on, by Triton kernels with the formulas of `portable`.

The bits are those of `portable` unless functions are used.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ElementwiseContract,
    QuantizeContract,
    RowContract,
    honour,
    row_contract,
)
from pallas_kernels.parts.jax_triton.row_launch import NEEDS, launch_rows, like, rows_served
from pallas_kernels.parts.served import served_if
from pallas_kernels.quantize.jax_triton.kernels import quantize_kernel, quantize_norm_kernel
from pallas_kernels.schedule.jax_triton.rows import RowSchedule
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]

_NEEDS: Final = f"{NEEDS}, with at least one column, and at least one row if places are given"


def _served(x: jax.Array, smooth: jax.Array | None = None, place: jax.Array | None = None, *_: Any, **__: Any) -> bool:
    smooth_served = smooth is None or smooth.dtype.name in ("float32", "bfloat16", "float16")
    return rows_served(x) and smooth_served and x.shape[1] > 0 and (x.shape[0] > 0 or place is None)


@served_if(_served, _NEEDS)
def quantize(
    x: jax.Array,
    smooth: jax.Array | None = None,
    place: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    contract: QuantizeContract,
    target: Target,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.quantize`.

    Guarantee: row-invariant.
    """
    return _quantize(x, smooth, place, expert, contract, target, schedule, gated=False)


@served_if(_served, _NEEDS)
def quantize_swiglu(
    x: jax.Array,
    smooth: jax.Array | None = None,
    place: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    contract: QuantizeContract,
    functions: ElementwiseContract,
    target: Target,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Computes `portable.quantize_swiglu` with the silu of `functions`.

    Guarantee: row-invariant.
    """
    honour("quantize_swiglu", functions, PTX_FUNCTIONS)
    return _quantize(x, smooth, place, expert, contract, target, schedule, gated=True)


@served_if(
    lambda x, weight=None, smooth=None, *_, **__: rows_served(x, weight, smooth) and x.shape[1] > 0,
    f"{NEEDS}, with at least one column",
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
    target: Target,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.quantize_norm`.

    Guarantee: row-invariant.
    """
    honour("quantize_norm", contract, row_contract())
    scale = jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)
    out = [jax.ShapeDtypeStruct(x.shape, jnp.int8), scale, scale if residual is None else like(x)]
    present = {"HAS_WEIGHT": weight is not None, "HAS_SMOOTH": smooth is not None, "HAS_RESIDUAL": residual is not None}
    options = {"EPS": float(eps), **present, **_format(quantize)}
    y, scales, total = launch_rows(
        quantize_norm_kernel, x, [weight, smooth, residual], out, target, schedule, **options
    )
    found = (_in_format(y, quantize), scales)
    return found if residual is None else (*found, total)


def _quantize(
    x: jax.Array,
    smooth: jax.Array | None,
    place: jax.Array | None,
    expert: jax.Array | None,
    contract: QuantizeContract,
    target: Target,
    schedule: RowSchedule | None,
    *,
    gated: bool,
) -> Arrays:
    m = x.shape[0] if place is None else place.shape[0]
    columns = x.shape[1] // (2 if gated else 1)
    out = [jax.ShapeDtypeStruct((m, columns), jnp.int8), jax.ShapeDtypeStruct((m, 1), jnp.float32)]
    by_expert = expert is not None and smooth is not None
    # The halves of a gated row are two arrays, and the scales of an expert are another one.
    reads = [x.dtype.itemsize] * (3 if gated else 2)
    sizes = [1 if place is None else x.shape[0], smooth.shape[0] if by_expert and smooth is not None else 1]
    options = {
        "HAS_SMOOTH": smooth is not None,
        "HAS_PLACE": place is not None,
        "HAS_EXPERT": expert is not None,
        "GATED": gated,
        **_format(contract),
    }
    y, scale = launch_rows(
        quantize_kernel,
        x,
        [smooth, place, expert, *sizes],
        out,
        target,
        schedule,
        shape=(m, columns),
        reads=reads,
        **options,
    )
    return _in_format(y, contract), scale


def _format(contract: QuantizeContract) -> dict[str, Any]:
    return {"LARGEST": float(contract.largest), "INTEGER": contract.format == "int8"}


def _in_format(y: jax.Array, contract: QuantizeContract) -> jax.Array:
    return y if contract.format == "int8" else lax.bitcast_convert_type(y, jnp.dtype(contract.format))
