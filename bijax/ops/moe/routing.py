"""Routing of a mixture of experts: scores, and the experts with the largest ones."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import describe, float_array, float_dtype, integer, same_dtype
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.core.tag import kernel_code
from bijax.dispatch.routing import largest_kernel
from bijax.ops.elementwise.call import elementwise
from bijax.ops.matmul.product import matmul
from bijax.ops.rows.softmax import softmax


def moe_gating_gemm(
    hidden_states: ArrayLike, weight: ArrayLike, *, preferred_element_type: DTypeLike | None = None
) -> jax.Array:
    """Scores the experts for each token: hidden_states @ weight, as `bijax.matmul` has it.

    Args:
        hidden_states: (..., C) float32, bfloat16 or float16.
        weight: (C, E) of the same dtype.
        preferred_element_type: Dtype of the result; `hidden_states.dtype` by default.

    Returns:
        (..., E).

    Raises:
        TypeError: If dtypes are unsupported or differ.
        ValueError: If the shapes do not fit.

    Guarantee: row-invariant; the gradients as those of `bijax.matmul`.

    Source: "moe_gating_gemm" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> moe_gating_gemm(jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0, 3.0], [0.0, 1.0, 3.0]])).tolist()
        [[1.0, 2.0, 9.0]]
    """
    op = "bijax.moe_gating_gemm"
    x, w = float_array(op, "hidden_states", hidden_states), float_array(op, "weight", weight)
    same_dtype(op, hidden_states=x, weight=w)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: hidden_states and weight must have the shapes (..., C) and (C, E), got {describe(x)} and"
            f" {describe(w)}."
        )
    dtype = x.dtype if preferred_element_type is None else preferred_element_type
    return matmul(x, w, preferred_element_type=float_dtype(op, "preferred_element_type", dtype))


def moe_softmax_topk(
    hidden_states: ArrayLike, topk: int, *, preferred_element_type: DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Selects the experts with the largest scores; their weights are the softmax of the selected scores.

    That is the softmax over all experts, divided by the sum of the selected ones. It is computed in float32 and rounded
    once. Scores are compared exactly. Among equal ones (+0 equals -0) the lower expert comes first, and nan comes
    before every number.

    Args:
        hidden_states: (..., E) float32, bfloat16 or float16, the scores of the experts.
        topk: Experts to select, in [0, E].
        preferred_element_type: Dtype of the weights; `hidden_states.dtype` by default.

    Returns:
        selected_experts (..., topk) int32, largest score first, and expert_weights (..., topk), which add up to 1. With
        a nan or +inf among the scores, the weights are nan.

    Raises:
        TypeError: If a dtype is unsupported or `topk` is not an integer.
        ValueError: If there are fewer experts.

    Guarantee: row-invariant; the gradient too.

    Source: "moe_softmax_topk" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> selected, weights = moe_softmax_topk(jnp.array([[0.0, 2.0, 2.0, 1.0]]), 2)
        >>> selected.tolist(), weights.tolist()
        ([[1, 2]], [[0.5, 0.5]])
    """
    op = "bijax.moe_softmax_topk"
    scores = float_array(op, "hidden_states", hidden_states)
    number = integer(op, "topk", topk)
    if scores.ndim < 1 or not 0 <= number <= scores.shape[-1]:
        raise ValueError(
            f"{op}: topk must be in [0, E] for hidden_states of the shape (..., E), got topk={number} and hidden_states"
            f" {describe(scores)}."
        )
    dtype = scores.dtype if preferred_element_type is None else preferred_element_type
    dtype = float_dtype(op, "preferred_element_type", dtype)
    rows = scores.reshape(math.prod(scores.shape[:-1]), scores.shape[-1])
    selected, chosen = _largest(rows, number)
    weights = _rounded(dtype)(softmax(chosen))
    shape = (*scores.shape[:-1], number)
    return selected.reshape(shape), weights.reshape(shape)


@custom_vjp(nondiff_argnums=(1,))
def _largest(scores: jax.Array, number: int) -> Arrays:
    """Returns the places (T, number) of the largest scores of rows (T, E), and these scores in float32."""
    return largest_kernel(scores, number=number)


def _forward(scores: jax.Array, number: int) -> tuple[Arrays, Arrays]:
    selected, chosen = largest_kernel(scores, number=number)
    return (selected, chosen), (scores, selected)


def _backward(number: int, saved: Arrays, cotangents: Any) -> tuple[jax.Array]:
    del number
    scores, selected = saved
    row = lax.broadcasted_iota(jnp.int32, selected.shape, 0)
    with kernel_code():  # every score has one place, so nothing is added
        g = jnp.zeros(scores.shape, jnp.float32).at[row, selected].set(cotangents[1], unique_indices=True)
    return (g.astype(scores.dtype),)


_largest.defvjp(_forward, _backward)


@functools.cache
def _rounded(dtype: Any) -> Any:
    return elementwise(lambda x: x.astype(dtype))
