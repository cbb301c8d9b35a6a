"""Sums by fixed trees of plain additions, on any platform that JAX runs on."""

import jax
import jax.numpy as jnp

from pallas_kernels._lanes import add_lanes, divide
from pallas_kernels._tiles import fold_row_chunks, isolate
from pallas_kernels.contract import ChunkContract, RowContract


def sum_axis(x: jax.Array, *, contract: RowContract, mean: bool = False) -> jax.Array:
    """Adds along the middle axis.

    Nothing but additions happens here, so the rows need no tiles: the bits are those of any other shape.

    Args:
        x: (A, R, B) of any floating dtype.
        contract: Order of the sum.
        mean: Whether to divide the sum by R.

    Returns:
        (A, B) float32. A sum of zeros is +0, whatever their signs.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> sum_axis(jnp.ones((1, 300, 2)), contract=row_contract()).tolist()
        [[300.0, 300.0]]
    """
    a, r, b = x.shape
    if 0 in x.shape:
        return jnp.full((a, b), jnp.nan if mean else 0.0, jnp.float32)
    (x,) = isolate(x)
    total = add_lanes(x.reshape(a, r) if b == 1 else x, contract).reshape(a, b)
    total = jnp.where(total == 0, jnp.float32(0), total)
    if mean:
        total = divide(total, r)
    return isolate(total)[0]


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
