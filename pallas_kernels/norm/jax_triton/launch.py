"""Norms of rows and their gradients on NVIDIA GPUs from Ampere on, by Triton kernels with the bits of `portable`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import RowContract, honour, row_contract
from pallas_kernels.norm.jax_triton.kernels import (
    layer_norm_gradient_kernel,
    layer_norm_kernel,
    rms_norm_gradient_kernel,
    rms_norm_kernel,
)
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.jax_triton.rows import sizes, warps
from pallas_kernels.parts.served import served_if
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]
NEEDS = "rows of up to 131072 columns of float32, bfloat16 or float16"
_MOST_COLUMNS = 131_072


def _served(x: jax.Array, *arrays: jax.Array | None) -> bool:
    dtypes = {a.dtype.name for a in (x, *arrays) if a is not None}
    return x.shape[1] <= _MOST_COLUMNS and dtypes <= {"float32", "bfloat16", "float16"}


@served_if(lambda x, weight=None, residual=None, **_: _served(x, weight, residual), NEEDS)
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    target: Target,
) -> Arrays:
    """Bit-identical to `portable.rms_norm`.

    Guarantee: row-invariant.
    """
    honour("rms_norm", contract, row_contract())
    row, number = jax.ShapeDtypeStruct(x.shape, x.dtype), _number(x)
    if x.size == 0:
        return (*_zeros(row, number), *([] if residual is None else _zeros(row)))
    total = number if residual is None else row  # not written without a residual
    options = {"EPS": float(eps), "HAS_WEIGHT": weight is not None, "HAS_RESIDUAL": residual is not None}
    found = _run(rms_norm_kernel, x, contract, target, [x, weight, residual], [row, number, total], options)
    return found[:2] if residual is None else found


@served_if(lambda h, factor, g, weight=None, g_sum=None, **_: _served(h, g, weight, g_sum), NEEDS)
def rms_norm_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    g_sum: jax.Array | None = None,
    *,
    contract: RowContract,
    target: Target,
) -> Arrays:
    """Bit-identical to `portable.rms_norm_gradient`.

    Guarantee: row-invariant.
    """
    honour("rms_norm_gradient", contract, row_contract())
    out = [jax.ShapeDtypeStruct(h.shape, h.dtype)]
    if h.size == 0:
        return _zeros(*out)
    options = {"HAS_WEIGHT": weight is not None, "HAS_SUM": g_sum is not None}
    return _run(rms_norm_gradient_kernel, h, contract, target, [h, factor, g, weight, g_sum], out, options)


@served_if(lambda x, weight=None, bias=None, **_: _served(x, weight, bias), NEEDS)
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    target: Target,
) -> Arrays:
    """Bit-identical to `portable.layer_norm`.

    Guarantee: row-invariant.
    """
    honour("layer_norm", contract, row_contract())
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype), _number(x), _number(x)]
    if x.size == 0:
        return _zeros(*out)
    options = {"EPS": float(eps), "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    return _run(layer_norm_kernel, x, contract, target, [x, weight, bias], out, options)


@served_if(lambda x, mean, factor, g, weight=None, **_: _served(x, g, weight), NEEDS)
def layer_norm_gradient(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    *,
    contract: RowContract,
    target: Target,
) -> Arrays:
    """Bit-identical to `portable.layer_norm_gradient`.

    Guarantee: row-invariant.
    """
    honour("layer_norm_gradient", contract, row_contract())
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if x.size == 0:
        return _zeros(*out)
    options = {"HAS_WEIGHT": weight is not None}
    return _run(layer_norm_gradient_kernel, x, contract, target, [x, mean, factor, g, weight], out, options)


def _run(
    kernel: Any,
    rows: jax.Array,
    contract: RowContract,
    target: Target,
    arrays: list[jax.Array | None],
    out: list[jax.ShapeDtypeStruct],
    options: dict[str, Any],
) -> Arrays:
    """Launches a kernel of one row per program; an absent array is not read."""
    m, columns = rows.shape
    return launch(
        kernel,
        *(rows if a is None else a for a in arrays),
        target=target,
        out=out,
        grid=(m,),
        warps=warps(columns, contract),
        stages=1,
        fuses=False,
        constants=sizes(columns, contract) | options,
    )


def _number(rows: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows.shape[0], 1), jnp.float32)


def _zeros(*out: jax.ShapeDtypeStruct) -> Arrays:
    return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
