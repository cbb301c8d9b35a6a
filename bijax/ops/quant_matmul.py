"""Matmul of int8 matrices with scales for rows and columns."""

from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.checks import float_dtype
from bijax.core.forward_only import forward_only
from bijax.ops._engine_arguments import check_shape, int8_array, scale_vector
from bijax.ops._integer_product import check_terms
from bijax.ops._quantized_product import quantized_kernel


def quant_matmul(
    hidden_states: Any,
    weight: Any,
    per_token_scale: Any,
    weight_scale: Any,
    *,
    bias: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    preferred_element_type: Any = jnp.bfloat16,
) -> jax.Array:
    """Multiplies int8 matrices: (hidden_states @ weight) * per_token_scale * weight_scale + bias.

    The products of integers are summed exactly, in int32. What follows is computed in float32, from left to right,
    each step rounded to nearest even, and rounded once more to the dtype of the result.

    Args:
        hidden_states: (M, K) int8, or (K, M) with `transpose_a`.
        weight: (K, N) int8, or (N, K) with `transpose_b`. K is at most 131071.
        per_token_scale: (M,) float32, as from `bijax.scale_dynamic_quant`.
        weight_scale: (N,) float32, bfloat16 or float16.
        bias: (N,) of any of these dtypes.
        transpose_a: Whether `hidden_states` is stored as (K, M).
        transpose_b: Whether `weight` is stored as (N, K).
        preferred_element_type: Dtype of the result, float32, bfloat16 or float16.

    Returns:
        (M, N). A row whose scale is nan is nan.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If the shapes do not fit, or K is so large that a sum could leave int32.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant, and the bits are the same on every platform: sums of integers are exact in every order.
    On a Hopper GPU weights are multiplied where they lie, in either storage, unless they are stored as (K, N) and there
    are more than 4096 rows; rows stored as (K, M) are copied first.

    Source: "quant_matmul" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> x, w = jnp.array([[1, 2]], jnp.int8), jnp.array([[3, 0], [4, 5]], jnp.int8)
        >>> quant_matmul(x, w, jnp.array([0.5]), jnp.array([1.0, 2.0]), bias=jnp.array([0.5, 0.0])).tolist()
        [[6.0, 10.0]]
    """
    return quantized_product(
        "bijax.quant_matmul",
        {"hidden_states": hidden_states, "per_token_scale": per_token_scale},
        {"weight": weight, "weight_scale": weight_scale, "bias": bias},
        (bool(transpose_a), bool(transpose_b)),
        preferred_element_type,
    )


def quantized_product(
    op: str, rows: dict[str, Any], weights: dict[str, Any], transposed: tuple[bool, bool], dtype: Any
) -> jax.Array:
    """Checks the operands of a quantised product, given by their names in messages, and multiplies them."""
    (x_name, x), (row_name, row) = rows.items()
    (w_name, w), (column_name, column), *rest = weights.items()
    x, w = int8_array(op, x_name, x), int8_array(op, w_name, w)
    sizes: dict[str, int] = {}
    check_shape(op, x_name, x, ("K", "M") if transposed[0] else ("M", "K"), sizes)
    check_shape(op, w_name, w, ("N", "K") if transposed[1] else ("K", "N"), sizes)
    check_terms(op, w_name, w, sizes["K"])
    row = scale_vector(op, row_name, row, ("M",), sizes).astype(jnp.float32)
    column = scale_vector(op, column_name, column, ("N",), sizes)
    bias = next((scale_vector(op, n, b, ("N",), sizes) for n, b in rest if b is not None), None)
    result_dtype = float_dtype(op, "preferred_element_type", dtype)

    def compute(*arrays: jax.Array) -> jax.Array:
        return quantized_kernel(*arrays, transposed=transposed, dtype=result_dtype.name)[0]

    y: jax.Array = forward_only(op, compute, x, w, row, column, *(() if bias is None else (bias,)))
    return y
