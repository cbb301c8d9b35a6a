"""Gathering the results of experts: the weighted sum of each token's rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import describe, float_array, float_dtype, integer_array
from bijax.core.derivative import custom_vjp
from bijax.dispatch.routing import add_rows_kernel
from bijax.ops._engine_arguments import check_known, check_shape, is_known, narrowed
from bijax.ops.elementwise.call import elementwise
from bijax.ops.moe._experts import Shared, combine, rows_of_tokens, rows_or_any, shared_experts
from bijax.ops.rows.reductions import sum as sum_of
from pallas_kernels.parts.no_row import WRONG

_OP = "bijax.moe_gather"


def moe_gather(
    scatter_tokens: ArrayLike,
    token_offset: ArrayLike,
    expert_weights: ArrayLike,
    *,
    num_shared_experts_per_rank: int = 0,
    num_tokens_offset: int = 0,
    num_tokens_per_rank: int | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Adds the rows of each token: each of its experts times its weight, by rank in its top k, then shared experts.

    Products and sums are computed in float32, each rounded, in that order; the result is rounded once more, and is +0
    rather than -0. An expert whose row is not in `scatter_tokens` counts as zero.

    The order does not depend on the positions of the rows. So a token's bits do not depend on the number of ranks that
    hold the experts, if the rows of all ranks are gathered and then added: shared rows of all ranks first (by expert,
    then by token), then the other rows, with their `token_offset` in the same order. Adding the results of several
    ranks afterwards gives a different sum.

    Args:
        scatter_tokens: (shared rows + A, C) float32, bfloat16 or float16, rows in the order of `bijax.moe_scatter`.
        token_offset: (A,) integers, token * topk + rank of the expert for each row that is not shared; negative for
            rows that are not used.
        expert_weights: (T, topk) of any of these dtypes.
        num_shared_experts_per_rank: Shared experts, whose rows come first and have weight 1.
        num_tokens_offset: First token of the shared experts.
        num_tokens_per_rank: Tokens of the shared experts; all from `num_tokens_offset` on by default.
        preferred_element_type: Dtype of the result; `scatter_tokens.dtype` by default.

    Returns:
        hidden_states (T, C). Where traced offsets give one place to several rows, the token is nan; if one is past the
        last token, everything is nan.

    Raises:
        TypeError: If a dtype is unsupported or a number is not an integer.
        ValueError: If the shapes do not fit, or known offsets are past the last token or not unique.

    Guarantee: row-invariant; the gradients of `scatter_tokens` and `expert_weights` too.

    Source: "moe_gather" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> rows = jnp.array([[1.0], [2.0], [3.0]])
        >>> moe_gather(rows, jnp.array([1, 2, 0]), jnp.array([[0.5, 2.0], [1.0, 1.0]])).tolist()
        [[3.5], [2.0]]
    """
    rows, weights = (
        float_array(_OP, "scatter_tokens", scatter_tokens),
        float_array(_OP, "expert_weights", expert_weights),
    )
    check_shape(_OP, "scatter_tokens", rows, ("rows", "C"), {})
    check_shape(_OP, "expert_weights", weights, ("T", "topk"), {})
    tokens, topk = weights.shape
    shared = shared_experts(_OP, tokens, num_shared_experts_per_rank, num_tokens_offset, num_tokens_per_rank)
    dtype = rows.dtype if preferred_element_type is None else preferred_element_type
    dtype = float_dtype(_OP, "preferred_element_type", dtype)
    offset = integer_array(_OP, "token_offset", token_offset)
    check_shape(_OP, "token_offset", offset, ("A",), {})
    if shared.rows + offset.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{_OP}: scatter_tokens must have {shared.rows} rows of shared experts and one for each token_offset, got"
            f" scatter_tokens {describe(rows)} and token_offset {describe(offset)}."
        )
    _check_offsets(offset, tokens * topk)
    offset = _as_int32(offset, tokens * topk)
    row = rows_of_tokens(offset, tokens, topk)
    if not shared.rows and min(rows.size, weights.size) > 0:
        return _add(rows, weights, row, offset, dtype)
    y = _gather(rows, weights, row, shared, dtype)
    wrong = functools.reduce(lambda a, b: a | b, [row[:, i] == WRONG for i in range(topk)], jnp.zeros((), bool))
    return jnp.where(wrong[..., None], jnp.asarray(jnp.nan, y.dtype), y)


def gather_from(rows: jax.Array, row: jax.Array, weights: jax.Array) -> jax.Array:
    """Does what `moe_gather` does, given the row (T, topk) of each token's expert, -1 for none."""
    rows, weights = float_array(_OP, "scatter_tokens", rows), float_array(_OP, "expert_weights", weights)
    return _gather(rows, weights, row, Shared(0, 0, 0), rows.dtype)


def _as_int32(offset: Any, places: int) -> jax.Array:
    """Returns offsets as int32, clamped to `places`."""
    given: jax.Array = jnp.asarray(offset)
    if given.dtype.itemsize <= 4 and jnp.issubdtype(given.dtype, jnp.signedinteger):
        return given.astype(jnp.int32)
    return jnp.where(given >= places, jnp.int32(places), narrowed(given, 0, places - 1))


def _check_offsets(offset: Any, places: int) -> None:
    if not is_known(offset):
        return
    used = np.maximum(offset, -1).astype(np.int64)
    check_known(_OP, "token_offset", used, -1, places - 1, "the tokens times topk; negative for rows not used")
    found, number = np.unique(used[used >= 0], return_counts=True)
    if (number > 1).any():
        raise ValueError(
            f"{_OP}: token_offset must give each place to one row, got {found[number > 1][0]} for"
            f" {number[number > 1][0]} rows."
        )


@custom_vjp(nondiff_argnums=(3, 4))
def _gather(rows: jax.Array, weights: jax.Array, row: jax.Array, shared: Shared, dtype: Any) -> jax.Array:
    return combine(rows, row, weights, shared, dtype)


def _forward(rows: jax.Array, weights: jax.Array, row: jax.Array, shared: Shared, dtype: Any) -> tuple[jax.Array, Any]:
    return combine(rows, row, weights, shared, dtype), (rows, weights, row)


@custom_vjp(nondiff_argnums=(4,))
def _add(rows: jax.Array, weights: jax.Array, row: jax.Array, offset: jax.Array, dtype: Any) -> jax.Array:
    return add_rows_kernel(rows, offset, row, weights, dtype=jnp.dtype(dtype).name)[0]


def _forward_of_sum(
    rows: jax.Array, weights: jax.Array, row: jax.Array, offset: jax.Array, dtype: Any
) -> tuple[jax.Array, Any]:
    return _add(rows, weights, row, offset, dtype), (rows, weights, row)


def _backward_of_sum(dtype: Any, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    wrong = jnp.any(saved[2] == WRONG, axis=1, keepdims=True)
    g = jnp.where(wrong, jnp.zeros((), g.dtype), g)  # nan whatever the rows are
    return *_backward(Shared(0, 0, 0), dtype, saved, g)[:2], None, None


_add.defvjp(_forward_of_sum, _backward_of_sum)

_product: Any = elementwise(lambda a, b: a.astype(jnp.float32) * b.astype(jnp.float32))


@functools.cache
def _rounded_product(dtype: Any) -> Any:
    return elementwise(lambda a, b: (a.astype(jnp.float32) * b.astype(jnp.float32)).astype(dtype))


def _backward(shared: Shared, dtype: Any, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    del dtype
    rows, weights, row = saved
    tokens, topk = row.shape
    scaled = _rounded_product(rows.dtype)(g[:, None], weights[..., None])
    # Every row has one place, so nothing is added here.
    at = jnp.where(row >= 0, row, rows.shape[0] + jnp.arange(row.size, dtype=jnp.int32).reshape(row.shape))
    own = jnp.zeros((rows.shape[0] - shared.rows, rows.shape[1]), rows.dtype)
    own = own.at[at.reshape(-1)].set(scaled.reshape(tokens * topk, -1), mode="drop", unique_indices=True)
    mine = g[shared.first : shared.first + shared.tokens].astype(rows.dtype)
    in_front = jnp.broadcast_to(mine[None], (shared.experts, *mine.shape)).reshape(shared.rows, rows.shape[1])
    products = _product(rows_or_any(rows[shared.rows :], row), g[:, None])
    dw = jnp.where(row >= 0, sum_of(products, -1), jnp.float32(0)).astype(weights.dtype)
    return jnp.concatenate([in_front, own]), dw, None


_gather.defvjp(_forward, _backward)
