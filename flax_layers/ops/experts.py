"""A mixture of experts on the operations of bijax: routing, and the experts in the dtype of the input or in int8."""

from typing import Any

import jax
import jax.numpy as jnp

import bijax
from bijax.ops.moe.gather import gather_from
from bijax.ops.moe.scatter import scatter_to_all
from bijax.ops.moe.select_experts import select_experts

from ..routing import Routing

_sigmoid: Any = bijax.elementwise(jax.nn.sigmoid)
_weights: Any = bijax.elementwise(lambda score, total, scale: score / (total + jnp.float32(1e-20)) * scale)


def route(logits: jax.Array, bias: jax.Array | None, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Selects the experts of tokens.

    Args:
        logits: (T, E or more) float32, the router's products; columns after those of the experts are left out.
        bias: (E,) float32 or None, added to the scores for the selection.
        routing: How.

    Returns:
        selected_experts (T, topk) int32 and their weights (T, topk) float32.
    """
    scale = jnp.float32(routing.scale)
    experts = min(routing.num_experts, logits.shape[1])
    simple = routing.scoring == "softmax" and bias is None and routing.num_groups == 1
    if simple and logits.dtype == jnp.float32:
        selected, weights, total = select_experts(logits, routing.topk, experts)
        return selected, _weights(weights, total if routing.normalise else jnp.ones((), jnp.float32), scale)
    logits = logits[:, :experts]
    scores = bijax.softmax(logits) if routing.scoring == "softmax" else _sigmoid(logits)
    choice = scores if bias is None else scores + bias
    selected = _largest(limited(choice, routing, _largest), routing.topk)
    weights = jnp.take_along_axis(scores, selected, axis=-1)
    total = bijax.sum(weights, axis=-1)[:, None] if routing.normalise else jnp.ones((), jnp.float32)
    return selected, _weights(weights, total, scale)


def limited(choice: jax.Array, routing: Routing, largest: Any) -> jax.Array:
    """Returns the scores (T, E), -inf for experts of groups that may not be selected."""
    if routing.num_groups == 1:
        return choice
    groups = choice.reshape(choice.shape[0], routing.num_groups, -1)
    best = largest(groups, 1 if routing.group_score == "largest" else 2)
    terms = jnp.take_along_axis(groups, best, axis=-1)
    worth = terms[..., 0] if terms.shape[-1] == 1 else terms[..., 0] + terms[..., 1]
    chosen = largest(worth, routing.topk_groups)
    open_groups = (chosen[..., None] == jnp.arange(routing.num_groups)).any(axis=-2)
    return jnp.where(open_groups[..., None], groups, -jnp.inf).reshape(choice.shape)


def _largest(x: jax.Array, number: int) -> jax.Array:
    return bijax.moe_softmax_topk(jax.lax.stop_gradient(x), number)[0]


def experts(x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Returns the sums (T, C) of the experts' results for tokens x (T, C); see `Ops.experts`."""
    rows, count, row = scatter_to_all(x, selected, gate_up.shape[0])
    inner = bijax.swiglu(bijax.group_matmul(rows, gate_up, count))
    return gather_from(bijax.group_matmul(inner, down, count), row, weights)


def quantized_experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: tuple[jax.Array, jax.Array],
    down: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Returns the sums (T, C) of int8 experts' results for tokens x (T, C); see `Ops.quantized_experts`."""
    rows, scale, count, offset = bijax.moe_scatter_dynamic_quant(x, selected, expert_end_idx=gate_up[0].shape[0])
    inner = bijax.moe_quant_group_gemm(rows, scale, *gate_up, count, preferred_element_type=x.dtype)
    rows, scale = bijax.moe_swiglu_dynamic_quant(inner, None, count)
    y = bijax.moe_quant_group_gemm(rows, scale, *down, count, preferred_element_type=x.dtype)
    return bijax.moe_gather(y, offset, weights)
