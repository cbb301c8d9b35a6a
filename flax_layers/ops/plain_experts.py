"""A mixture of experts in plain JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..routing import Routing
from .experts import limited

type Product = Callable[[jax.Array, Any], jax.Array]


def route(logits: jax.Array, bias: jax.Array | None, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Selects the experts (T, topk) of tokens by logits (T, E or more), and returns their weights too."""
    logits = logits[:, : routing.num_experts]
    scores = jax.nn.softmax(logits) if routing.scoring == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    selected = _largest(limited(choice, routing, _largest), routing.topk)
    weights = jnp.take_along_axis(scores, selected, axis=-1)
    if routing.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return selected, weights * routing.scale


def _largest(x: jax.Array, number: int) -> jax.Array:
    return jax.lax.top_k(x, number)[1]


def experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    num_experts: int,
    first: Product,
    second: Product,
) -> jax.Array:
    """Returns the sums (T, C) of experts; the products take rows sorted by expert and the rows of each expert."""
    tokens, topk = selected.shape
    order = jnp.argsort(selected.reshape(-1), stable=True)
    count = jnp.bincount(selected.reshape(-1), length=num_experts)
    gate, up = jnp.split(first(x[order // topk], count), 2, axis=-1)
    y = second(jax.nn.silu(gate) * up, count).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    return jnp.zeros((tokens, y.shape[1]), jnp.float32).at[order // topk].add(y).astype(x.dtype)
