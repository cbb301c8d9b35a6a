"""Sequences whose numbers are out of range: marked in the limits of a call, nan in its results."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.pages import pages_inside
from pallas_kernels.parts.xla.where import where


def marked(limits: jax.Array | np.ndarray, valid: jax.Array | None) -> jax.Array | np.ndarray:
    """Returns limits in which sequences that are not valid have a negative number of queries.

    Kernels give nan for them, so that a program needs no other pass over the results.

    Args:
        limits: (B, 3) int32.
        valid: (B,) bool; None for all.
    """
    if valid is None:
        return limits
    offsets, queries, keys = (limits[:, i] for i in range(3))
    return jnp.stack([offsets, jnp.where(valid, queries, -1), keys], axis=1)


def within(call: AttentionCall) -> tuple[AttentionCall, jax.Array]:
    """Returns the call with limits and pages that exist, and the (B,) mask of sequences that had such."""
    limits, table = jnp.asarray(call.limits), call.page_table
    valid = limits[:, 1] >= 0
    if table is not None:
        page, count = call.key.shape[1], call.key.shape[0]
        valid = valid & pages_inside(table, limits[:, 2], page, count)
        table = jnp.clip(table, 0, max(0, count - 1))
    return replace(call, limits=jnp.maximum(limits, 0), page_table=table), valid


def poison(valid: jax.Array | None, *results: jax.Array) -> tuple[jax.Array, ...]:
    """Returns results (B, ...) with nan for sequences that are not valid."""
    if valid is None:
        return results
    return tuple(where(valid.reshape(-1, *[1] * (r.ndim - 1)), r, np.nan) for r in results)
