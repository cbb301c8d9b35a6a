"""Quantisation of rows as primitives, which choose their kernel for the platform."""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.contracts import recorded_as
from bijax.core.primitive import Arrays
from bijax.dispatch.rows import define_row_kernel, row_backend
from pallas_kernels.contract import QuantizeContract
from pallas_kernels.target import Target

FORMATS: Final = ("int8", "float8_e4m3fn")
"""Names of the dtypes of 8 bits that rows are quantised to."""


def format_of(op: str, dtype: Any) -> QuantizeContract:
    """Returns the contract of a dtype of 8 bits.

    Raises:
        TypeError: If rows are not quantised to this dtype.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in FORMATS:
        raise TypeError(f"{op}: dtype must be {' or '.join(FORMATS)}, got {name}.")
    return QuantizeContract(name)


def _pick_and_quantize(target: Target, *arrays: jax.Array, names: tuple[str, ...], **parameters: Any) -> Arrays:
    """Quantises picked rows, recorded as rows that are quantised before they are picked: both are schedules of one."""
    given = [array.dtype.name for array, name in zip(arrays, names, strict=True) if name in ("x", "smooth")]
    with recorded_as(f"{','.join(given)} -> {parameters['contract'].format},float32"):
        return _QUANTIZE(target, *arrays, names=names, **parameters)


_QUANTIZE: Final = row_backend("quantize")
_kernel = define_row_kernel("quantize")
# Rows picked by index keep their place: a mapped axis cannot be merged into them.
_picked_kernel = define_row_kernel("quantize_picked", folds=False, backend=_pick_and_quantize)
_swiglu_kernel = define_row_kernel("quantize_swiglu", folds=False)
_norm_kernel = define_row_kernel("quantize_norm")


def quantize_rows(x: jax.Array, smooth: jax.Array | None, contract: QuantizeContract) -> tuple[jax.Array, jax.Array]:
    """Quantises each row of x * smooth: (..., C) and (C,) to (..., C) and the scales (...)."""
    y, scale = _kernel({"x": _rows(x), "smooth": smooth}, contract=contract)
    return y.reshape(x.shape), scale.reshape(x.shape[:-1])


def quantize_norm(
    x: jax.Array,
    weight: jax.Array | None,
    smooth: jax.Array | None,
    residual: jax.Array | None,
    eps: float,
    contract: QuantizeContract,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises the norms of x + residual, (..., C); returns that sum, the numbers of 8 bits and the scales (...)."""
    arrays = {
        "x": _rows(x),
        "weight": weight,
        "smooth": smooth,
        "residual": None if residual is None else _rows(residual),
    }
    y, scale, *h = _norm_kernel(arrays, eps=eps, quantize=contract)
    return (h[0] if h else x).reshape(x.shape), y.reshape(x.shape), scale.reshape(x.shape[:-1])


def quantize_picked(
    x: jax.Array, smooth: jax.Array | None, place: jax.Array, expert: jax.Array, contract: QuantizeContract
) -> tuple[jax.Array, jax.Array]:
    """Quantises the rows of x (S, C) at `place` (R,), times their experts' smooth scales (E, C).

    Where `expert` (R,) is negative there is no row: zeros, with scale 0, or nan if it is less than -1.
    """
    arrays = {"x": x, "smooth": _of_some(smooth), "place": place[:, None], "expert": expert[:, None]}
    y, scale = _picked_kernel(arrays, contract=contract)
    return y, scale[:, 0]


def quantize_swiglu(
    x: jax.Array, smooth: jax.Array | None, expert: jax.Array, contract: QuantizeContract
) -> tuple[jax.Array, jax.Array]:
    """Quantises the SwiGLU of the rows of x (R, 2C), times smooth scales (E, C), as `quantize_picked`."""
    y, scale = _swiglu_kernel({"x": x, "smooth": _of_some(smooth), "expert": expert[:, None]}, contract=contract)
    return y, scale[:, 0]


def _of_some(smooth: jax.Array | None) -> jax.Array | None:
    """Returns the vectors of experts; None if there are no experts, and so no rows to pick for."""
    return None if smooth is None or smooth.shape[0] == 0 else smooth


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
