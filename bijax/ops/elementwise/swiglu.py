"""SwiGLU of rows that hold gates and values side by side, as it is or quantised."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import describe, float_array
from bijax.core.forward_only import forward_only
from bijax.ops._engine_arguments import check_shape
from bijax.ops.elementwise.call import elementwise
from bijax.ops.moe._experts import Rows, numbers_of_experts, rows_by_count, shared_experts
from bijax.ops.moe.scatter import smooth_vectors
from bijax.ops.quantized._rows import format_of, quantize_swiglu
from pallas_kernels.parts.xla.join import halves

_swiglu: Any = elementwise(
    lambda gate, up: (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
)


def swiglu(x: ArrayLike) -> jax.Array:
    """Returns silu(gate) * up, where the first half of a row is gate and the second one up.

    It is computed in float32 and rounded once.

    Args:
        x: (..., 2 * C) float32, bfloat16 or float16.

    Returns:
        (..., C) of the dtype of `x`.

    Raises:
        TypeError: If the dtype is unsupported.
        ValueError: If rows have an odd length.

    Guarantee: row-invariant, each element being a row; the gradient too.

    Example:
        >>> swiglu(jnp.array([0.0, 100.0, 5.0, 2.0])).tolist()
        [0.0, 200.0]
    """
    op = "bijax.swiglu"
    array = float_array(op, "x", x)
    if array.ndim < 1 or array.shape[-1] % 2:
        raise ValueError(f"{op}: x must have rows of even length (..., 2 * C), got {describe(array)}.")
    gate, up = halves(array)
    return _swiglu(gate, up)


def moe_swiglu_dynamic_quant(
    scatter_tokens: ArrayLike,
    smooth_scale: ArrayLike | None,
    experts_token_count: ArrayLike,
    *,
    num_shared_experts_per_rank: int = 0,
    num_tokens_per_rank: int = 0,
    dtype: DTypeLike = jnp.int8,
) -> tuple[jax.Array, jax.Array]:
    """Takes the SwiGLU of rows and quantises it, each row with the smooth scale of its expert.

    That is silu(gate) * up in float32, not rounded in between, and `bijax.scale_dynamic_quant`.

    Args:
        scatter_tokens: (num_shared_experts_per_rank * num_tokens_per_rank + A, 2 * C) float32, bfloat16 or float16,
            rows in the order of `bijax.moe_scatter`.
        smooth_scale: (num_shared_experts_per_rank + E, C) of a floating dtype, shared experts first; None for ones.
        experts_token_count: (E,) integers, the rows of each expert that is not shared; they add up to at most A.
        num_shared_experts_per_rank: Shared experts of the rank.
        num_tokens_per_rank: Rows of each shared expert.
        dtype: int8 or float8_e4m3fn.

    Returns:
        y (rows, C) of `dtype` and per_token_scale (rows,) float32. Rows after the last expert's have zeros and scale 0.
        If traced counts are negative or add up to more than A, the scales of all rows but the shared ones are nan.

    Raises:
        TypeError: If a dtype is unsupported or a number is not an integer.
        ValueError: If the shapes do not fit, or known counts are negative or add up to more than A.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: a row depends on itself and on the smooth scale of its expert alone.

    Source: "moe_swiglu_dynamic_quant" of xpu-perf (https://github.com/bytedance/xpu-perf), whose
    num_tokens_offset changes nothing here.

    Example:
        >>> y, scale = moe_swiglu_dynamic_quant(jnp.array([[100.0, 1.27], [50.0, 0.0]]), None, jnp.array([1]))
        >>> y.tolist(), scale.tolist()
        ([[127], [0]], [1.0, 0.0])
    """
    op = "bijax.moe_swiglu_dynamic_quant"
    x = float_array(op, "scatter_tokens", scatter_tokens)
    check_shape(op, "scatter_tokens", x, ("rows", "2 * C"), {})
    if x.shape[1] % 2:
        raise ValueError(f"{op}: scatter_tokens must have rows of even length 2 * C, got {describe(x)}.")
    shared = shared_experts(op, x.shape[0], num_shared_experts_per_rank, 0, num_tokens_per_rank)
    own = x.shape[0] - shared.rows
    if own < 0:
        raise ValueError(
            f"{op}: scatter_tokens must have at least num_shared_experts_per_rank * num_tokens_per_rank ="
            f" {shared.rows} rows, got {describe(x)}."
        )
    rows = rows_by_count(op, "experts_token_count", experts_token_count, None, own)
    contract = format_of(op, dtype)
    smooth = smooth_vectors(op, smooth_scale, shared.experts + rows.count.size, x.shape[1] // 2)

    def compute(x: jax.Array, smooth: jax.Array | None, found: Rows) -> tuple[jax.Array, jax.Array]:
        return quantize_swiglu(x, smooth, numbers_of_experts(found, shared), contract)

    y, scale = forward_only(op, compute, x, smooth, rows)
    return y, scale
