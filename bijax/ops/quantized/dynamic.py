"""Quantisation of rows to 8 bits with a scale for each."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import describe, float_array, row_vector, same_dtype
from bijax.core.forward_only import forward_only
from bijax.ops.norm._arguments import check_eps
from bijax.ops.quantized._rows import format_of, quantize_norm, quantize_rows


def scale_dynamic_quant(
    hidden_states: ArrayLike, smooth_scale: ArrayLike | None = None, *, dtype: DTypeLike = jnp.int8
) -> tuple[jax.Array, jax.Array]:
    """Quantises rows: with h = hidden_states * smooth_scale, y = round(h / scale), scale = max(abs(h)) / largest.

    The largest number is 127 for int8, 448 for float8_e4m3fn. Everything is computed in float32, each step rounded to
    nearest even; y is between the largest number and its negative. A scale is at least 2 ** -126, the scale of a row of
    zeros. A row with an inf or nan in h has scale nan and zeros in y, so that anything computed from
    it is nan. On a CPU XLA takes subnormal numbers for zeros.

    Args:
        hidden_states: (..., C) float32, bfloat16 or float16.
        smooth_scale: (C,) of any of these dtypes, multiplied to the columns first; ones by default.
        dtype: int8 or float8_e4m3fn.

    Returns:
        y (..., C) of `dtype`, and scale (...) float32.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If the shapes do not fit.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant.

    Source: "scale_dynamic_quant" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> y, scale = scale_dynamic_quant(jnp.array([[1.0, -127.0], [0.0, 0.0]]), jnp.array([4.0, 1.0]))
        >>> y.tolist(), scale[0].item()
        ([[4, -127], [0, 0]], 1.0)
    """
    op = "bijax.scale_dynamic_quant"
    x = float_array(op, "hidden_states", hidden_states)
    smooth = row_vector(op, "smooth_scale", smooth_scale, x, "hidden_states")
    contract = format_of(op, dtype)
    y, scale = forward_only(op, lambda x, smooth: quantize_rows(x, smooth, contract), x, smooth)
    return y, scale


def add_rms_norm_dynamic_quant(
    hidden_states: ArrayLike,
    weight: ArrayLike | None = None,
    smooth_scale: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    eps: float = 1e-6,
    dtype: DTypeLike = jnp.int8,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds a residual, takes the RMS norm and quantises: `bijax.rms_norm` and `bijax.scale_dynamic_quant` in one.

    The sum is rounded to the dtype of `hidden_states` before it is normalized; the norm is quantised in float32,
    without a rounding in between.

    Args:
        hidden_states: (..., C) float32, bfloat16 or float16.
        weight: (C,) of any of these dtypes, the weight of the norm.
        smooth_scale: (C,) of any of these dtypes, multiplied to the norm; ones by default.
        residual: Of the shape and dtype of `hidden_states`, added to it first.
        eps: Added to the mean square; at least 0.
        dtype: int8 or float8_e4m3fn.

    Returns:
        after_res, the sum (`hidden_states` itself without a residual), of the shape and dtype of `hidden_states`; y
        (..., C) of `dtype`; and per_token_scale (...) float32. Of rows of zeros, inf or nan see `scale_dynamic_quant`.

    Raises:
        TypeError: If a dtype is unsupported or differs between `hidden_states` and `residual`, or `eps` is not a number
            known at tracing time.
        ValueError: If the shapes do not fit, or `eps` is negative or not finite.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant.

    Source: "add_rms_norm_dynamic_quant" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> x = jnp.array([[2.0, -2.0]])
        >>> after_res, y, scale = add_rms_norm_dynamic_quant(x, jnp.array([1.0, 127.0]), residual=x, eps=0.0)
        >>> after_res.tolist(), y.tolist(), scale.tolist()
        ([[4.0, -4.0]], [[1, -127]], [1.0])
    """
    op = "bijax.add_rms_norm_dynamic_quant"
    x = float_array(op, "hidden_states", hidden_states)
    weight = row_vector(op, "weight", weight, x, "hidden_states")
    smooth = row_vector(op, "smooth_scale", smooth_scale, x, "hidden_states")
    residual = None if residual is None else float_array(op, "residual", residual)
    same_dtype(op, hidden_states=x, residual=residual)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have the shape of hidden_states, got hidden_states {describe(x)} and residual"
            f" {describe(residual)}."
        )
    eps = check_eps(op, eps)

    contract = format_of(op, dtype)

    def compute(
        x: jax.Array, weight: jax.Array | None, smooth: jax.Array | None, residual: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return quantize_norm(x, weight, smooth, residual, eps, contract)

    after_res, y, scale = forward_only(op, compute, x, weight, smooth, residual)
    return after_res, y, scale
