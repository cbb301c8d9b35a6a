"""The sum of the rows of each token's experts, times their weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.derivative import custom_vjp
from bijax.core.explicit_axes import gathered_once
from bijax.core.partitioning import whole_array
from bijax.core.tag import kernel_code
from bijax.dispatch.expert_sums import add_expert_rows_kernel, total, weighted
from bijax.ops.elementwise.call import elementwise
from bijax.ops.moe._experts import Shared

# Products and sums are two steps, or a compiler could contract them.
_weighted: Any = elementwise(weighted)


@functools.cache
def _total(dtype: Any) -> Any:
    return elementwise(functools.partial(total, dtype=dtype))


def rows_or_any(rows: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the rows (T, topk, C) of the tokens; an arbitrary row where a token has none."""
    if rows.shape[0] == 0:
        return jnp.zeros((*row.shape, rows.shape[1]), rows.dtype)
    with kernel_code():  # whole rows, copied
        return jnp.take(whole_array(rows), row, axis=0, mode="clip")


def combine(rows: jax.Array, row: jax.Array, weights: jax.Array, shared: Shared, dtype: Any) -> jax.Array:
    """Adds each token's rows in float32: by rank in its top k, each times its weight, then shared experts in order.

    Args:
        rows: (R, C), the rows of shared experts first.
        row: (T, topk) int32, from `rows_of_tokens`.
        weights: (T, topk).
        shared: The rows of shared experts.
        dtype: Dtype of the result.

    Returns:
        (T, C), rounded once; +0 rather than -0. A missing row counts as zero.
    """
    if shared.rows or 0 in (*rows.shape, *row.shape):
        return _in_steps(rows, row, weights, shared, dtype)
    return _at_once(rows, row, weights, jnp.dtype(dtype).name)


def _in_steps(rows: jax.Array, row: jax.Array, weights: jax.Array, shared: Shared, dtype: Any) -> jax.Array:
    tokens, topk = row.shape
    parts = _weighted(rows_or_any(rows[shared.rows :], row), weights[..., None], (row >= 0)[..., None])
    after = tokens - shared.first - shared.tokens
    before_it = shared.of_expert(rows).astype(jnp.float32)
    before_it = jnp.pad(before_it, ((0, 0), (shared.first, after), (0, 0)))
    terms = [parts[:, i] for i in range(topk)] + [before_it[i] for i in range(shared.experts)]
    if not terms:
        return jnp.zeros((tokens, rows.shape[1]), dtype)
    found: jax.Array = _total(dtype)(*terms)
    return found


@custom_vjp(nondiff_argnums=(3,))
def _at_once(rows: jax.Array, row: jax.Array, weights: jax.Array, dtype: str) -> jax.Array:
    rows, row, weights = gathered_once(rows, row, weights)
    return add_expert_rows_kernel(whole_array(rows), row, weights, dtype=dtype)[0]


def _forward(rows: jax.Array, row: jax.Array, weights: jax.Array, dtype: str) -> tuple[jax.Array, Any]:
    return _at_once(rows, row, weights, dtype), (rows, row, weights)


def _backward(dtype: str, saved: Any, g: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    """Differentiates the steps: what uses sums has gradients of its own, so this is for those of gradients."""
    rows, row, weights = saved
    _, pull = jax.vjp(lambda rows, weights: _in_steps(rows, row, weights, Shared(0, 0, 0), dtype), rows, weights)
    of_rows, of_weights = pull(g)
    return of_rows, None, of_weights


_at_once.defvjp(_forward, _backward)
