"""Scattering tokens to the experts of a rank, as they are or quantised."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import describe, float_array, integer, integer_array
from bijax.core.derivative import custom_vjp
from bijax.core.forward_only import forward_only
from bijax.dispatch.routing import spread_kernel
from bijax.ops._engine_arguments import scale_vector
from bijax.ops.moe._experts import (
    Rows,
    Shared,
    combine,
    copied,
    expert_range,
    numbers_of_experts,
    numbers_within,
    own_rows,
    places,
    shared_experts,
    sort_by_expert,
    spread,
)
from bijax.ops.moe._pick import pick_rows
from bijax.ops.quantized._rows import format_of, quantize_picked, quantize_rows
from pallas_kernels.parts.no_row import NO_ROW

_FEW_ROWS: Final = 128  # in one kernel
_FEW_PLACES: Final = 1024  # which a GPU sorts and copies in one kernel


def moe_scatter(
    hidden_states: ArrayLike,
    selected_experts: ArrayLike,
    *,
    expert_start_idx: int = 0,
    expert_end_idx: int,
    allocated_tokens: int | None = None,
    num_shared_experts_per_rank: int = 0,
    num_tokens_offset: int = 0,
    num_tokens_per_rank: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Copies each token to a row for each of its experts on this rank, rows sorted by expert.

    First come the rows of shared experts, one expert after the other, each with the tokens [num_tokens_offset,
    num_tokens_offset + num_tokens_per_rank). Then come `allocated_tokens` rows for the experts [expert_start_idx,
    expert_end_idx), ordered by expert, then by token. Unused rows are zeros.

    Args:
        hidden_states: (T, C) float32, bfloat16 or float16.
        selected_experts: (T, topk) integers. Experts that are not on this rank, and negative ones, are skipped.
        expert_start_idx: First expert of the rank.
        expert_end_idx: End of the rank's experts (exclusive).
        allocated_tokens: Rows for experts that are not shared; T * topk by default.
        num_shared_experts_per_rank: Shared experts of the rank.
        num_tokens_offset: First token for the shared experts.
        num_tokens_per_rank: Tokens for the shared experts; all from `num_tokens_offset` on by default.

    Returns:
        scatter_tokens (shared rows + allocated_tokens, C); experts_token_count (experts of the rank,) int32, shared
        ones not counted; and token_offset (allocated_tokens,) int32: token * topk + place in `selected_experts` of each
        row that is not shared, -1 for unused rows. If traced experts need more rows than there are, all rows but
        the shared ones are nan, and experts_token_count adds up to more than `allocated_tokens`.

    Raises:
        TypeError: If a dtype is unsupported or a number is not an integer.
        ValueError: If the shapes do not fit, a range is invalid, or known experts need more rows.

    Guarantee: row-invariant: a copy is exact. The gradient of `hidden_states` is row-invariant too: a token's rows are
    added in the order of `bijax.moe_gather`.

    Source: "moe_scatter_dynamic_quant" of xpu-perf (https://github.com/bytedance/xpu-perf), without the quantisation.

    Example:
        >>> x, experts = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[1, 0], [0, 2], [1, 0]])
        >>> rows, count, offset = moe_scatter(x, experts, expert_end_idx=2)
        >>> rows[:, 0].tolist(), count.tolist(), offset.tolist()
        ([1.0, 2.0, 3.0, 1.0, 3.0, 0.0], [3, 2], [1, 2, 5, 0, 4, -1])
    """
    op = "bijax.moe_scatter"
    x, selected = _tokens(op, hidden_states, selected_experts)
    first, end = expert_range(op, expert_start_idx, expert_end_idx)
    shared = shared_experts(op, x.shape[0], num_shared_experts_per_rank, num_tokens_offset, num_tokens_per_rank)
    rows = sort_by_expert(op, selected, first, end, _allocated(op, allocated_tokens, selected))
    y = _spread(x, rows, selected.shape[1], shared)
    return y, rows.count, rows.offset


def scatter_to_all(hidden_states: Any, selected_experts: Any, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Does what `moe_scatter` does on a rank with all experts.

    Args:
        hidden_states: (T, C) of a floating dtype.
        selected_experts: (T, topk) integers.
        experts: Number of experts.

    Returns:
        The rows (T * topk, C), the number (experts,) of each expert's rows, and the row (T, topk) of each token's
        expert, -1 for experts that do not exist.

    Raises:
        TypeError: As `moe_scatter`.
        ValueError: As `moe_scatter`.
    """
    op = "bijax.moe_scatter"
    x, selected = _tokens(op, hidden_states, selected_experts)
    if 0 < selected.size <= _FEW_PLACES and x.size and experts:
        y, count, row = _to_all(x, numbers_within(selected, 0, experts), experts)
        return y, count, row
    rows = sort_by_expert(op, selected, 0, experts, _allocated(op, None, selected))
    y = _spread(x, rows, selected.shape[1], Shared(0, 0, 0))
    return y, rows.count, own_rows(rows).reshape(selected.shape)


def moe_scatter_dynamic_quant(
    hidden_states: ArrayLike,
    selected_experts: ArrayLike,
    smooth_scale: ArrayLike | None = None,
    *,
    expert_start_idx: int = 0,
    expert_end_idx: int,
    allocated_tokens: int | None = None,
    num_shared_experts_per_rank: int = 0,
    num_tokens_offset: int = 0,
    num_tokens_per_rank: int | None = None,
    dtype: DTypeLike = jnp.int8,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Copies each token to a row for each of its experts on this rank, and quantises the rows.

    The rows are laid out as by `bijax.moe_scatter` and quantised as by `bijax.scale_dynamic_quant`, each with the
    smooth scale of its expert.

    Args:
        hidden_states: (T, C) float32, bfloat16 or float16.
        selected_experts: (T, topk) integers. Experts that are not on this rank, and negative ones, are skipped.
        smooth_scale: (num_shared_experts_per_rank + experts of the rank, C) of a floating dtype, shared experts first;
            ones by default.
        expert_start_idx: First expert of the rank.
        expert_end_idx: End of the rank's experts (exclusive).
        allocated_tokens: Rows for experts that are not shared; T * topk by default.
        num_shared_experts_per_rank: Shared experts of the rank.
        num_tokens_offset: First token for the shared experts.
        num_tokens_per_rank: Tokens for the shared experts; all from `num_tokens_offset` on by default.
        dtype: int8 or float8_e4m3fn.

    Returns:
        scatter_tokens (shared rows + allocated_tokens, C) of `dtype`; scatter_per_token_scale, a float32 for each row;
        experts_token_count (experts of the rank,) int32, shared ones not counted; and token_offset (allocated_tokens,)
        int32, as from `bijax.moe_scatter`. Unused rows have zeros and scale 0. If traced experts need more rows
        than there are, the scales of all rows but the shared ones are nan, and experts_token_count adds up to more
        than `allocated_tokens`.

    Raises:
        TypeError: If a dtype is unsupported or a number is not an integer.
        ValueError: If the shapes do not fit, a range is invalid, or known experts need more rows.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: a row depends on its token and on the smooth scale of its expert alone, not on the
    number of rows, on its place or on the experts of the rank.

    Source: "moe_scatter_dynamic_quant" of xpu-perf (https://github.com/bytedance/xpu-perf), whose token_offset has two
    shapes; this is the one that "moe_gather" takes.

    Example:
        >>> x, experts = jnp.array([[127.0], [2.0]]), jnp.array([[1], [0]])
        >>> smooth = jnp.array([[63.5], [1.0]])
        >>> rows, scale, count, offset = moe_scatter_dynamic_quant(x, experts, smooth, expert_end_idx=2)
        >>> rows.tolist(), scale.tolist(), count.tolist(), offset.tolist()
        ([[127], [127]], [1.0, 1.0], [1, 1], [1, 0])
    """
    op = "bijax.moe_scatter_dynamic_quant"
    x, selected = _tokens(op, hidden_states, selected_experts)
    first, end = expert_range(op, expert_start_idx, expert_end_idx)
    shared = shared_experts(op, x.shape[0], num_shared_experts_per_rank, num_tokens_offset, num_tokens_per_rank)
    smooth = smooth_vectors(op, smooth_scale, shared.experts + end - first, x.shape[1])
    contract = format_of(op, dtype)
    rows = sort_by_expert(op, selected, first, end, _allocated(op, allocated_tokens, selected))

    def compute(x: jax.Array, smooth: jax.Array | None, found: Rows) -> tuple[jax.Array, jax.Array]:
        place, expert = places(found.offset, selected.shape[1], shared), numbers_of_experts(found, shared)
        if smooth is None and expert.size > _FEW_ROWS:
            # All rows of a token are equal: it is quantised once, and copied.
            y, scale = quantize_rows(x, None, contract)
            at = jnp.where(expert < 0, expert, place)
            y8 = copied(jax.lax.bitcast_convert_type(y, jnp.int8), at, found)
            return jax.lax.bitcast_convert_type(y8, y.dtype), pick_rows(scale[:, None], at)[:, 0]
        return quantize_picked(x, smooth, place, expert, contract)

    y, scale = forward_only(op, compute, x, smooth, rows)
    return y, scale, rows.count, rows.offset


def smooth_vectors(op: str, smooth_scale: Any, experts: int, columns: int) -> jax.Array | None:
    """Checks the smooth scales (experts, columns)."""
    return None if smooth_scale is None else scale_vector(op, "smooth_scale", smooth_scale, (experts, columns), {})


def _tokens(op: str, hidden_states: Any, selected_experts: Any) -> tuple[jax.Array, Any]:
    x, selected = (
        float_array(op, "hidden_states", hidden_states),
        integer_array(op, "selected_experts", selected_experts),
    )
    if x.ndim != 2 or selected.ndim != 2 or x.shape[0] != selected.shape[0]:
        raise ValueError(
            f"{op}: hidden_states and selected_experts must have the shapes (T, C) and (T, topk), got {describe(x)} and"
            f" {describe(selected)}."
        )
    return x, selected


def _allocated(op: str, allocated_tokens: Any, selected: Any) -> int:
    if allocated_tokens is None:
        return int(np.prod(selected.shape))
    number = integer(op, "allocated_tokens", allocated_tokens)
    if not 0 <= number < 2**31:
        raise ValueError(f"{op}: allocated_tokens must be at least 0 and below 2**31, got {number}.")
    return number


@custom_vjp(nondiff_argnums=(2, 3))
def _spread(x: jax.Array, rows: Rows, topk: int, shared: Shared) -> jax.Array:
    return spread(x, rows, topk, shared)


def _forward(x: jax.Array, rows: Rows, topk: int, shared: Shared) -> tuple[jax.Array, Any]:
    # Rows that are nan have no gradient.
    row = jnp.where(rows.fit, own_rows(rows), NO_ROW).reshape(x.shape[0], topk)
    return spread(x, rows, topk, shared), row


def _backward(topk: int, shared: Shared, row: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    del topk
    return combine(g, row, jnp.ones(row.shape, jnp.float32), shared, g.dtype), None


_spread.defvjp(_forward, _backward)


@custom_vjp(nondiff_argnums=(2,))
def _to_all(x: jax.Array, selected: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(T, C), (T, topk) int32: the rows, their numbers, and the row of each place."""
    y, count, row = spread_kernel(x, selected.reshape(-1), experts=experts, topk=selected.shape[1])
    return y, count, row.reshape(selected.shape)


def _to_all_forward(x: jax.Array, selected: jax.Array, experts: int) -> tuple[Any, jax.Array]:
    found = _to_all(x, selected, experts)
    return found, found[2]


def _to_all_backward(experts: int, row: jax.Array, cotangents: Any) -> tuple[jax.Array, None]:
    del experts
    g = cotangents[0]
    return combine(g, row, jnp.ones(row.shape, jnp.float32), Shared(0, 0, 0), g.dtype), None


_to_all.defvjp(_to_all_forward, _to_all_backward)
