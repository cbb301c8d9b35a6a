"""Attention on any platform: one program of fixed shape for every call.

This is the plain way to invariance, for platforms on which no other tile has been compared with it.
"""

import jax

from pallas_kernels.attention import _backward, _tiling
from pallas_kernels.attention._programs import Dot
from pallas_kernels.attention._spec import AttentionSpec
from pallas_kernels.schedule.attention import FIXED, GRADIENT_REFERENCE, Tile


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    page_table: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    dot: Dot,
) -> tuple[jax.Array, jax.Array]:
    """Attends to keys; `pallas_kernels.attention.cpu.attention` describes arguments and results.

    Guarantee: row-invariant, as far as `dot` is.
    """
    arrays = (query, key, value, offsets, query_lengths, key_lengths, page_table)
    return _tiling.run(*arrays, spec=spec, choose=_one_tile, dot=dot)


def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    *,
    spec: AttentionSpec,
    dot: Dot,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the backward pass; `pallas_kernels.attention.cpu.gradients` describes arguments and results.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    arrays = (query, key, value, out, lse, cotangent, offsets, query_lengths, key_lengths)
    return _backward.gradients(*arrays, spec=spec, tile=GRADIENT_REFERENCE, dot=dot)


def _one_tile(batch: int, queries: int, capacity: int, shape: _tiling.ProgramShape) -> Tile:
    return FIXED
