"""JAX's primitives for cuDNN's attention, with their operands and parameters, by the library's own attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.ops.attention._arguments import limits_of
from bijax.ops.attention._rule import attend, bias_gradient, gradients
from pallas_kernels.attention.call import AttentionCall, AttentionOptions, AttentionResults

_HEADS_FIRST = 1
"""Value of the parameter `layout` for (B, N, T, H), instead of (B, T, N, H)."""


def cudnn_attention(*operands: jax.Array, is_training: bool, **parameters: Any) -> tuple[jax.Array, ...]:
    """Attends as `dot_product_attention_fwd` of JAX.

    Args:
        *operands: Queries, keys, values, bias, lengths of queries and of keys, offsets of packed sequences (unused),
            page tables of keys and of values. Absent operands have no elements.
        is_training: Whether to return the log-sum-exp too.
        **parameters: The primitive's other parameters.

    Returns:
        The outputs, and (B, N, T) float32.

    Guarantee: row-invariant: the bits equal those of `bijax.dot_product_attention`. The pages of each sequence are
    gathered first, since keys and values have separate tables.
    """
    out, lse = attend(_call(operands[:10], parameters), None, "dot_product_attention_fwd")
    out = _arranged(out, parameters)
    return (out, jnp.swapaxes(lse, 1, 2)) if is_training else (out,)


def cudnn_attention_gradients(*operands: jax.Array, **parameters: Any) -> tuple[jax.Array, ...]:
    """Differentiates as `dot_product_attention_bwd` of JAX.

    Args:
        *operands: The operands of `cudnn_attention`, then the log-sum-exp, the outputs and their cotangents.
        **parameters: The primitive's parameters.

    Returns:
        The gradients of queries, keys and values and, where the second of `variadic_args` asks for it, of the bias.

    Guarantee: as `bijax.dot_product_attention`.
    """
    call = _call(operands[:10], parameters)
    lse = jnp.swapaxes(operands[10], 1, 2)
    out, cotangent = (_arranged(x, parameters) for x in operands[11:13])
    results = AttentionResults(out, lse, cotangent)
    found = tuple(_arranged(g, parameters) for g in gradients(call, results))
    has_bias_gradient = parameters["variadic_args"][1]
    return (*found, bias_gradient(call, results)) if has_bias_gradient else found


def _arranged(x: jax.Array, parameters: dict[str, Any]) -> jax.Array:
    """Returns an array (B, T, N, H) in the layout of the primitive, or one of that layout as (B, T, N, H)."""
    return jnp.swapaxes(x, 1, 2) if parameters["layout"] == _HEADS_FIRST else x


def _call(operands: tuple[jax.Array, ...], parameters: dict[str, Any]) -> AttentionCall:
    query, key, value, bias, query_lengths, key_lengths, _, _, key_table, value_table = operands
    query, key, value = (_arranged(x, parameters) for x in (query, key, value))
    paged = key_table.ndim == 4
    if paged:
        key, value = _gathered(key, key_table), _gathered(value, value_table)
    batch, (queries, keys) = query.shape[0], (x.shape[1] for x in (query, key))
    mask = parameters["mask_type"].name
    has_lengths = paged or mask.startswith("PADDING")

    def up_to(lengths: jax.Array, most: int) -> jax.Array | np.ndarray:
        return jnp.clip(lengths, 0, most).astype(jnp.int32) if has_lengths else np.full(batch, most, np.int32)

    limits = limits_of(np.zeros(batch, np.int32), up_to(query_lengths, queries), up_to(key_lengths, keys))
    # A query at p sees keys after p - length, and none after itself.
    length = parameters["sliding_window_length"]
    window = (length - 1, 0) if length else None
    options = AttentionOptions(float(parameters["scale"]), mask.endswith("CAUSAL"), window)
    return AttentionCall(query, key, value, limits, options, bias=bias if parameters["variadic_args"][0] else None)


def _gathered(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Returns pages (P, page, K, H) by a table (B, 1, n, 1) as (B, n * page, K, H)."""
    found = jnp.take(pages, table[:, 0, :, 0], axis=0, mode="clip")
    return found.reshape(found.shape[0], -1, *found.shape[3:])
