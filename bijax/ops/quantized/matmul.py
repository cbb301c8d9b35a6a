"""Matmul of matrices of 8 bits with scales for rows and columns."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import flag, float_dtype, same_dtype
from bijax.core.forward_only import forward_only
from bijax.ops._engine_arguments import array_of_8_bits, check_shape, scale_vector
from bijax.ops.quantized._integer import check_terms
from bijax.ops.quantized._product import quantized_kernel

_OP = "bijax.quant_matmul"


def quant_matmul(
    hidden_states: ArrayLike,
    weight: ArrayLike,
    per_token_scale: ArrayLike,
    weight_scale: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    preferred_element_type: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """Multiplies matrices of 8 bits: (hidden_states @ weight) * per_token_scale * weight_scale + bias.

    Integer products are summed exactly, in int32. float8_e4m3fn products are summed over blocks of 128 of K, whose sums
    are added in order in float32 (`pallas_kernels.contract.Float8Contract`): on a Hopper GPU its tensor core
    sums a block, keeping about 14 bits, elsewhere float32 does. The epilogue is computed in float32, from left to
    right, each step rounded to nearest even, and rounded once more to the dtype of the result.

    Args:
        hidden_states: (M, K) int8 or float8_e4m3fn, or (K, M) with `transpose_a`.
        weight: (K, N) of the same dtype, or (N, K) with `transpose_b`. K is at most 131071 for int8.
        per_token_scale: (M,) float32, as from `bijax.scale_dynamic_quant`.
        weight_scale: (N,) float32, bfloat16 or float16.
        bias: (N,) of any of these dtypes.
        transpose_a: Whether `hidden_states` is stored as (K, M).
        transpose_b: Whether `weight` is stored as (N, K).
        preferred_element_type: Dtype of the result, float32, bfloat16 or float16.

    Returns:
        (M, N). A row whose scale is nan is nan.

    Raises:
        TypeError: If a dtype is unsupported, or the dtypes of `hidden_states` and `weight` differ.
        ValueError: If the shapes do not fit, or K is so large that a sum could leave int32.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant, and with int8 the bits are the same on every platform: sums of integers are exact in every
    order. On a Hopper GPU weights stored along K are multiplied in place, and int8 weights stored as (K, N) too,
    up to 4096 rows; other operands are copied first.

    Source: "quant_matmul" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> x, w = jnp.array([[1, 2]], jnp.int8), jnp.array([[3, 0], [4, 5]], jnp.int8)
        >>> quant_matmul(x, w, jnp.array([0.5]), jnp.array([1.0, 2.0]), bias=jnp.array([0.5, 0.0])).tolist()
        [[6.0, 10.0]]
    """
    return quantized_product(
        _OP,
        {"hidden_states": hidden_states, "per_token_scale": per_token_scale},
        {"weight": weight, "weight_scale": weight_scale, "bias": bias},
        (flag(_OP, "transpose_a", transpose_a), flag(_OP, "transpose_b", transpose_b)),
        preferred_element_type,
    )


def quantized_product(
    op: str, rows: dict[str, Any], weights: dict[str, Any], transposed: tuple[bool, bool], dtype: Any
) -> jax.Array:
    """Checks the operands of a quantised product, passed by their names in messages, and multiplies them."""
    (x_name, x), (row_name, row) = rows.items()
    (w_name, w), (column_name, column), *rest = weights.items()
    x, w = array_of_8_bits(op, x_name, x), array_of_8_bits(op, w_name, w)
    same_dtype(op, **{x_name: x, w_name: w})
    sizes: dict[str, int] = {}
    check_shape(op, x_name, x, ("K", "M") if transposed[0] else ("M", "K"), sizes)
    check_shape(op, w_name, w, ("N", "K") if transposed[1] else ("K", "N"), sizes)
    if w.dtype == jnp.int8:
        check_terms(op, w_name, w, sizes["K"])
    row = scale_vector(op, row_name, row, ("M",), sizes).astype(jnp.float32)
    column = scale_vector(op, column_name, column, ("N",), sizes)
    bias = next((scale_vector(op, n, b, ("N",), sizes) for n, b in rest if b is not None), None)
    result_dtype = float_dtype(op, "preferred_element_type", dtype)

    def compute(*arrays: jax.Array) -> jax.Array:
        return quantized_kernel(*arrays, transposed=transposed, dtype=result_dtype.name)[0]

    return forward_only(op, compute, x, w, row, column, *(() if bias is None else (bias,)))
