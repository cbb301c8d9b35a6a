"""Sums by fixed trees of plain additions, invariant on any platform that JAX runs on."""

import jax
import jax.numpy as jnp

from pallas_kernels._tiles import fold_row_chunks, isolate
from pallas_kernels.contract import ChunkContract


def sum_rows(x: jax.Array, *, contract: ChunkContract, accumulate: jax.Array | None = None) -> jax.Array:
    """Adds the rows of a batch.

    A chunk of rows is added by a halving tree (row i plus row i + rows/2, and so on), chunk sums upwards.

    Args:
        x: (M, C) of any floating dtype.
        contract: Chunks of rows; their number of rows must be a power of two.
        accumulate: (C,) float32, a previous sum whose chain is continued.

    Returns:
        (C,) float32.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> sum_rows(jnp.ones((300, 2)), contract=chunk_contract()).tolist()
        [300.0, 300.0]
    """
    (x,) = isolate(x)
    total = jnp.zeros(x.shape[1:], jnp.float32) if accumulate is None else accumulate

    def chunk_sum(chunk: jax.Array) -> jax.Array:
        chunk = chunk.astype(jnp.float32)
        while chunk.shape[0] > 1:
            half = chunk.shape[0] // 2
            (chunk,) = isolate(chunk[:half] + chunk[half:])
        return chunk[0]

    return fold_row_chunks(chunk_sum, [x], contract.rows, total)
