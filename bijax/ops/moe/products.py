"""Products of experts: rows sorted by expert, each multiplied by its expert's weights."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import flag, float_array, float_dtype, same_dtype
from bijax.core.derivative import custom_vjp
from bijax.core.forward_only import forward_only
from bijax.core.primitive import Arrays
from bijax.dispatch.groups import group_matmul_kernel, group_weight_gradient_kernel
from bijax.dispatch.matmul import Product
from bijax.ops._engine_arguments import array_of_8_bits, check_shape, scale_vector
from bijax.ops.matmul._arguments import precision_of
from bijax.ops.moe._experts import checked_counts
from bijax.ops.quantized._integer import check_terms
from bijax.ops.quantized._product import quantized_groups_kernel
from bijax.ops.quantized.matmul import quantized_product


def moe_quant_matmul(
    hidden_states: ArrayLike,
    per_token_scale: ArrayLike,
    expert_weight: ArrayLike,
    expert_scale: ArrayLike,
    *,
    preferred_element_type: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """Multiplies the rows of a shared expert by its weights: `bijax.quant_matmul` by the names of an engine.

    Args:
        hidden_states: (M, K) int8 or float8_e4m3fn.
        per_token_scale: (M,) float32.
        expert_weight: (K, N) of the same dtype. K is at most 131071 for int8.
        expert_scale: (N,) float32, bfloat16 or float16.
        preferred_element_type: Dtype of the result, float32, bfloat16 or float16.

    Returns:
        (M, N).

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If the shapes do not fit, or K is so large that a sum could leave int32.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant.

    Source: "moe_quant_matmul" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> x = jnp.array([[1, 2]], jnp.int8)
        >>> moe_quant_matmul(x, jnp.array([0.5]), x.T, jnp.array([2.0])).tolist()
        [[5.0]]
    """
    return quantized_product(
        "bijax.moe_quant_matmul",
        {"hidden_states": hidden_states, "per_token_scale": per_token_scale},
        {"expert_weight": expert_weight, "expert_scale": expert_scale},
        (False, False),
        preferred_element_type,
    )


def moe_quant_group_gemm(
    scatter_tokens: ArrayLike,
    per_token_scale: ArrayLike,
    experts_weight: ArrayLike,
    experts_scale: ArrayLike,
    experts_token_count: ArrayLike,
    *,
    preferred_element_type: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """Multiplies rows of 8 bits by the weights of their experts: (x @ w) * per_token_scale * experts_scale.

    The products are summed as by `bijax.quant_matmul`, integers exactly; both scales are multiplied in
    float32, from left to right, each step rounded to nearest even, and the result is rounded once more.

    Args:
        scatter_tokens: (A, K) int8 or float8_e4m3fn, sorted by expert.
        per_token_scale: (A,) float32.
        experts_weight: (E, K, N) of the same dtype. K is at most 131071 for int8.
        experts_scale: (E, N) float32, bfloat16 or float16.
        experts_token_count: (E,) integers, the rows of each expert; they add up to at most A.
        preferred_element_type: Dtype of the result, float32, bfloat16 or float16.

    Returns:
        (A, N). Rows after the last expert's are zeros. If traced counts are negative or add up to more than A,
        everything is nan.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If the shapes do not fit, K is so large that a sum could leave int32, or known counts are negative
            or add up to more than A.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: a row depends on itself and on the weights and scales of its expert alone, not on the
    number of its expert's rows. Sums of integers are exact in every order.

    Source: "moe_quant_group_gemm" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> x, w = jnp.array([[1, 2], [3, 4]], jnp.int8), jnp.array([[[1], [0]], [[0], [1]]], jnp.int8)
        >>> moe_quant_group_gemm(x, jnp.ones(2), w, jnp.array([[1.0], [2.0]]), jnp.array([1, 1])).tolist()
        [[1.0], [8.0]]
    """
    op = "bijax.moe_quant_group_gemm"
    x = array_of_8_bits(op, "scatter_tokens", scatter_tokens)
    w = array_of_8_bits(op, "experts_weight", experts_weight)
    same_dtype(op, scatter_tokens=x, experts_weight=w)
    sizes: dict[str, int] = {}
    check_shape(op, "scatter_tokens", x, ("A", "K"), sizes)
    check_shape(op, "experts_weight", w, ("E", "K", "N"), sizes)
    if w.dtype == jnp.int8:
        check_terms(op, "experts_weight", w, sizes["K"])
    scale = scale_vector(op, "per_token_scale", per_token_scale, ("A",), sizes).astype(jnp.float32)
    columns = scale_vector(op, "experts_scale", experts_scale, ("E", "N"), sizes)
    dtype = float_dtype(op, "preferred_element_type", preferred_element_type)
    counts = checked_counts(op, "experts_token_count", experts_token_count, sizes["E"], sizes["A"])

    def compute(*arrays: jax.Array) -> jax.Array:
        return quantized_groups_kernel(*arrays, dtype=dtype.name)[0]

    return forward_only(op, compute, x, w, scale, columns, counts)


def group_matmul(
    x: ArrayLike,
    w: ArrayLike,
    group_sizes: ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    zero_unused: bool = True,
) -> jax.Array:
    """Multiplies rows by the weights of their groups, which the rows are sorted by, as `jax.lax.ragged_dot` does.

    Products are summed in float32, in the order of `bijax.matmul`, and rounded once.

    Args:
        x: (M, K) float32, bfloat16 or float16, sorted by group (expert).
        w: (G, K, N) of the same dtype.
        group_sizes: (G,) integers, the rows of each group; they add up to at most M.
        precision: As in `bijax.matmul`.
        preferred_element_type: Dtype of the result; `x.dtype` by default.
        zero_unused: Whether rows after the last group's are zeros. Otherwise a GPU may leave them unwritten, which
            takes less time: they can hold any number or nan, and nothing that is used may depend on them. They are
            zeros when the product is differentiated.

    Returns:
        (M, N). Rows after the last group's are zeros or undefined. If traced sizes are negative or add up to more than
        M, everything is nan.

    Raises:
        TypeError: If dtypes are unsupported or differ, or `zero_unused` is no bool.
        ValueError: If the shapes do not fit, or known sizes are negative or add up to more than M.

    Guarantee: row-invariant: a row depends on itself and on the weights of its group alone; the gradient of `x` too.
    The gradient of a group's weights depends on the group's own rows alone, which are summed from the first one on:
    in chunks of 128, on a Hopper GPU in 16 bits as one chain in steps of 16.

    Example:
        >>> x, w = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[[1.0]], [[10.0]]])
        >>> group_matmul(x, w, jnp.array([1, 2])).tolist()
        [[1.0], [20.0], [30.0]]
    """
    op = "bijax.group_matmul"
    x, w = float_array(op, "x", x), float_array(op, "w", w)
    same_dtype(op, x=x, w=w)
    sizes: dict[str, int] = {}
    check_shape(op, "x", x, ("M", "K"), sizes)
    check_shape(op, "w", w, ("G", "K", "N"), sizes)
    dtype = float_dtype(
        op, "preferred_element_type", x.dtype if preferred_element_type is None else preferred_element_type
    )
    counts = checked_counts(op, "group_sizes", group_sizes, sizes["G"], sizes["M"])
    return _group_matmul(x, w, counts, dtype, precision_of(op, precision), flag(op, "zero_unused", zero_unused))


@custom_vjp(nondiff_argnums=(3, 4, 5))
def _group_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, precision: str, zero_unused: bool
) -> jax.Array:
    if x.shape[1] == 0:  # sums of one zero
        x, w = jnp.zeros((x.shape[0], 1), x.dtype), jnp.zeros((w.shape[0], 1, w.shape[2]), w.dtype)
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((x.shape[0], w.shape[2]), dtype)
    options = {} if zero_unused else {"zero_unused": False}
    return group_matmul_kernel(x, w, sizes, product=Product(dtype.name, precision=precision), **options)[0]


def _forward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, precision: str, zero_unused: bool
) -> tuple[jax.Array, Arrays]:
    del zero_unused
    return _group_matmul(x, w, sizes, dtype, precision, True), (x, w, sizes)


def _backward(
    dtype: Any, precision: str, zero_unused: bool, saved: Arrays, g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    del dtype, zero_unused
    x, w, sizes = saved
    wide = jnp.promote_types(g.dtype, x.dtype)
    x, w, g = (a.astype(wide) for a in (x, w, g))
    if 0 in (*x.shape, *w.shape):
        dx, dw = jnp.zeros_like(x), jnp.zeros_like(w)
    else:
        product = Product(saved[0].dtype.name, precision=precision)
        (dx,) = group_matmul_kernel(g, w, sizes, product=replace(product, transpose_w=True))
        (dw,) = group_weight_gradient_kernel(x, g, sizes, product=product)
    return dx.astype(saved[0].dtype), dw.astype(saved[1].dtype), None


_group_matmul.defvjp(_forward, _backward)
