"""Norms over the last axis."""

import functools
import math
from typing import Any

import jax

from bijax.ops._checks import describe, float_array, same_dtype
from bijax.ops._primitive import Arrays
from bijax.ops._rows import as_rows, define_row_kernel
from bijax.ops.sum_rows import sum_rows
from pallas_kernels.contract import row_contract
from pallas_kernels.norm import tiled


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6, residual: Any = None) -> Any:
    """Divides rows by their root mean square: h / sqrt(mean(h * h) + eps) * weight, with h = x + residual.

    Computed in float32 and rounded once; only h is rounded to the dtype of `x` before its norm is taken.

    Args:
        x: (..., C) float32, bfloat16 or float16.
        weight: (C,) of any of these dtypes, for example float32 with a bfloat16 `x`.
        eps: Added to the mean square; at least 0.
        residual: Of the shape and dtype of `x`, added to it first.

    Returns:
        An array of the shape and dtype of `x`, or, with a residual, the pair of it and h.

    Raises:
        TypeError: If a dtype is unsupported, or those of `x` and `residual` differ.
        ValueError: If the shapes do not fit or `eps` is negative or not finite.

    Guarantee: row-invariant; the gradients of `x` and `residual` too. The gradient of `weight` is split-invariant for
    cuts of the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`).

    Source: "rms_norm" in the project's operator seed document.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.array([3.0, 3.0]), eps=0.0).tolist()
        [1.0, 1.0]
        >>> y, h = rms_norm(jnp.array([3.0, 3.0]), jnp.array([1.0, 2.0]), eps=0.0, residual=jnp.array([1.0, 1.0]))
        >>> y.tolist(), h.tolist()
        ([1.0, 2.0], [4.0, 4.0])
    """
    op = "bijax.rms_norm"
    x = float_array(op, "x", x)
    residual = None if residual is None else float_array(op, "residual", residual)
    same_dtype(op, x=x, residual=residual)
    weight = _vector(op, "weight", weight, x)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have the shape of x, got x {describe(x)} and residual {describe(residual)}."
        )
    eps = _check_eps(op, eps)
    rows, back = as_rows(x, (x.ndim - 1,))
    if residual is None:
        return back(_rms_norm(rows, weight, None, eps))
    y, h = _rms_norm(rows, weight, residual.reshape(rows.shape), eps)
    return back(y), back(h)


def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> jax.Array:
    """Normalises rows: d / sqrt(mean(d * d) + eps) * weight + bias, with d = x - mean(x).

    Computed in float32 and rounded once. The variance is taken in a second pass over the row, so that it keeps its
    digits when the mean is large.

    Args:
        x: (..., C) float32, bfloat16 or float16.
        weight: (C,) of any of these dtypes.
        bias: (C,) of any of these dtypes.
        eps: Added to the variance; at least 0.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If the shapes do not fit or `eps` is negative or not finite.

    Guarantee: row-invariant; the gradient of `x` too. The gradients of `weight` and `bias` are split-invariant for
    cuts of the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`).

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.array([1.0, 3.0]), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    op = "bijax.layer_norm"
    x = float_array(op, "x", x)
    weight, bias = _vector(op, "weight", weight, x), _vector(op, "bias", bias, x)
    rows, back = as_rows(x, (x.ndim - 1,))
    return back(_layer_norm(rows, weight, bias, _check_eps(op, eps)))


def _vector(op: str, name: str, vector: Any, x: jax.Array) -> jax.Array | None:
    if x.ndim < 1:
        raise ValueError(f"{op}: x must have at least 1 dimension, got {describe(x)}.")
    if vector is None:
        return None
    array = float_array(op, name, vector)
    if array.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} must have the shape {x.shape[-1:]} of a row of x, got {name} {describe(array)} and x"
            f" {describe(x)}."
        )
    return array


def _check_eps(op: str, eps: float) -> float:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{op}: eps must be a finite number of at least 0, got {eps}.")
    return float(eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rms_norm(x: jax.Array, weight: jax.Array | None, residual: jax.Array | None, eps: float) -> Any:
    return _rms_norm_forward(x, weight, residual, eps)[0]


def _rms_norm_forward(
    x: jax.Array, weight: jax.Array | None, residual: jax.Array | None, eps: float
) -> tuple[Any, tuple[jax.Array | None, ...]]:
    arrays = {"x": x, "weight": weight, "residual": residual}
    y, factor, *rest = _rms_norm_kernel(arrays, eps=eps, contract=row_contract())
    if residual is None:
        return y, (x, factor, weight)
    return (y, rest[0]), (rest[0], factor, weight)


def _rms_norm_backward(eps: float, saved: Any, g: Any) -> tuple[jax.Array | None, ...]:
    h, factor, weight = saved
    g, g_sum = g if isinstance(g, tuple) else (g, None)
    arrays = {"h": h, "factor": factor, "g": g, "weight": weight, "g_sum": g_sum}
    dh, *parts = _rms_norm_gradient_kernel(arrays, contract=row_contract())
    return dh, _sum_parts(parts, weight), None if g_sum is None else dh


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float) -> jax.Array:
    return _layer_norm_forward(x, weight, bias, eps)[0]


def _layer_norm_forward(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    arrays = {"x": x, "weight": weight, "bias": bias}
    y, mean, factor = _layer_norm_kernel(arrays, eps=eps, contract=row_contract())
    return y, (x, mean, factor, weight, bias)


def _layer_norm_backward(eps: float, saved: Any, g: jax.Array) -> tuple[jax.Array | None, ...]:
    x, mean, factor, weight, bias = saved
    arrays = {"x": x, "mean": mean, "factor": factor, "g": g, "weight": weight}
    dx, *parts = _layer_norm_gradient_kernel(arrays, contract=row_contract())
    return dx, _sum_parts(parts, weight), _sum_parts([g], bias)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def _sum_parts(parts: Arrays | list[jax.Array], vector: jax.Array | None) -> jax.Array | None:
    """Adds every row's part of the gradient of a vector."""
    return None if vector is None else sum_rows(parts[0]).astype(vector.dtype)


_rms_norm_kernel = define_row_kernel("rms_norm", tiled.rms_norm)
_rms_norm_gradient_kernel = define_row_kernel("rms_norm_gradient", tiled.rms_norm_gradient)
_layer_norm_kernel = define_row_kernel("layer_norm", tiled.layer_norm)
_layer_norm_gradient_kernel = define_row_kernel("layer_norm_gradient", tiled.layer_norm_gradient)
