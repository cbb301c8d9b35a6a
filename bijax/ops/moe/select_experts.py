"""The experts of tokens by the softmax of the router's products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.dispatch.select_experts import select_experts_kernel
from bijax.ops.moe.routing import moe_softmax_topk
from bijax.ops.rows.reductions import sum as sum_axis
from bijax.ops.rows.softmax import softmax


def select_experts(logits: jax.Array, number: int, experts: int | None = None) -> Arrays:
    """Selects the experts with the largest probabilities, the softmax of logits. No checks.

    Args:
        logits: (T, E or more) float32.
        number: How many, in [1, E].
        experts: E, if there are more columns, which are left out.

    Returns:
        selected_experts (T, number) int32, largest probability first, and of equal ones the lower expert; their
        probabilities (T, number), and the sum of these (T, 1), in float32. The bits and the gradients are those of
        `bijax.softmax`, the largest numbers of it, and `bijax.sum` of these.

    Guarantee: row-invariant; the gradient too.

    Example:
        >>> selected, chosen, total = select_experts(jnp.zeros((1, 4)), 2)
        >>> selected.tolist(), chosen.tolist(), total.tolist()
        ([[0, 1]], [[0.25, 0.25]], [[0.5]])
    """
    return _select(logits, number, logits.shape[1] if experts is None else experts)


@custom_vjp(nondiff_argnums=(1, 2))
def _select(logits: jax.Array, number: int, experts: int) -> Arrays:
    return select_experts_kernel(logits, number=number, experts=experts)


def _in_pieces(logits: jax.Array, number: int) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns the probabilities and their sum, and the experts."""
    scores = softmax(logits)
    selected = moe_softmax_topk(lax.stop_gradient(scores), number)[0]
    chosen = jnp.take_along_axis(scores, selected, axis=-1)
    return (chosen, sum_axis(chosen, axis=-1)[:, None]), selected


def _forward(logits: jax.Array, number: int, experts: int) -> tuple[Arrays, Any]:
    # With its gradient the pieces run: it needs all probabilities.
    (chosen, total), pull, selected = jax.vjp(lambda x: _in_pieces(x[:, :experts], number), logits, has_aux=True)
    return (selected, chosen, total), pull


def _backward(number: int, experts: int, pull: Any, cotangents: Any) -> tuple[jax.Array]:
    del number, experts
    gradients: tuple[jax.Array] = pull(tuple(cotangents[1:]))
    return gradients


_select.defvjp(_forward, _backward)
