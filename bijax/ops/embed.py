"""Embedding: rows of a table by token id, with a gradient whose bits do not depend on micro-batches."""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from bijax.core.checks import describe, float_array, integer_array
from bijax.core.derivative import custom_vjp
from bijax.core.partitioning import whole_array
from bijax.core.primitive import Arrays, define_kernel
from bijax.dispatch.kernels import backend_of

_OP = "bijax.embed"


def embed(table: ArrayLike, tokens: ArrayLike) -> jax.Array:
    """Looks up the rows of a table.

    The look-up is exact anyway. Its gradient is a sum over the batch, which stock JAX takes in one run over all
    tokens.

    Args:
        table: (V, D) float32, bfloat16 or float16.
        tokens: (...) integers. A token outside the table gets nan and has no gradient; it is never clamped or wrapped.
            With an empty table all are outside.

    Returns:
        (..., D) of the dtype of `table`.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If `table` does not have two dimensions.

    Guarantee: row-invariant; the gradient of `table` is split-invariant for cuts of the tokens at multiples of 128
    (`pallas_kernels.contract.ROW_CHUNK`).

    Example:
        >>> embed(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0])).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    table, ids = float_array(_OP, "table", table), integer_array(_OP, "tokens", tokens, on_host=False)
    if table.ndim != 2:
        raise ValueError(f"{_OP}: table must have two dimensions (tokens, features), got {describe(table)}.")
    # An id that does not fit in int32 must not wrap into the table, nor may a negative one count from its end.
    inside = (ids >= 0) & (ids < table.shape[0])
    names = jnp.where(inside, ids, table.shape[0]).astype(jnp.int32)
    return _embed(table, names.reshape(math.prod(ids.shape))).reshape(*ids.shape, table.shape[1])


@custom_vjp()
def _embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of (V, D) by tokens (M,) int32, without checks."""
    if table.shape[0] == 0:  # where jnp.take finds nothing to fill from
        return jnp.full((tokens.size, table.shape[1]), jnp.nan, table.dtype)
    return jnp.take(whole_array(table), tokens, axis=0, mode="fill", fill_value=jnp.nan)


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Arrays]:
    return _embed(table, tokens), (table, tokens)


def _backward(saved: Arrays, g: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = saved
    (dtable,) = _gradient(tokens, g, jnp.zeros_like(table))
    return dtable, None


_embed.defvjp(_forward, _backward)


_gradient = define_kernel("embed_gradient", backend_of("embed_gradient"))
