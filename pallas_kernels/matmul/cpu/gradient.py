"""Weight gradients on the CPU: fused chains over chunks of rows, in programs verified against the reference."""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import ChunkContract, MatmulContract
from pallas_kernels.matmul.cpu import stacked
from pallas_kernels.parts.xla.tiles import fold_row_chunks, isolate, pad_rows


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: ChunkContract,
    transpose_w: bool = False,
    accumulate: jax.Array | None = None,
) -> jax.Array:
    """Sums the outer products of rows: the gradient of `w` in `x @ w`.

    Args:
        x: (M, K) float32, bfloat16 or float16.
        g: (M, N), the cotangent of the product.
        contract: Chunks of rows; each chunk is one fused chain.
        transpose_w: Whether to return the gradient as (N, K).
        accumulate: A previous float32 sum of the result's shape, whose chain continues.

    Returns:
        (K, N) float32, or (N, K) with `transpose_w`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows. An element's bits depend on its column
    of `x` and its column of `g` alone.
    """
    left, right = (g, x) if transpose_w else (x, g)
    left, right = (a.astype(jnp.float32) for a in isolate(left, right))
    shape = (left.shape[1], right.shape[1])
    if 0 in shape:
        return jnp.zeros(shape, jnp.float32) if accumulate is None else accumulate

    def outer(a: jax.Array, b: jax.Array) -> jax.Array:
        return stacked.matmul(a[None], b[None], contract=MatmulContract(contract.rows), transpose_x=True)[0]

    if accumulate is None and 0 < left.shape[0] <= contract.rows:
        return _from_zero(outer(*(pad_rows(a, contract.rows) for a in (left, right))))
    total = jnp.zeros(shape, jnp.float32) if accumulate is None else accumulate
    return fold_row_chunks(outer, [left, right], contract.rows, total)


def stacked_weight_gradient(x: jax.Array, g: jax.Array, *, contract: ChunkContract) -> jax.Array:
    """Sums the outer products of the rows of every entry of a stack.

    Args:
        x: (G, M, K) float32, bfloat16 or float16.
        g: (G, M, N).
        contract: Chunks of rows; each chunk is one fused chain.

    Returns:
        (G, K, N) float32.

    Guarantee: split-invariant in the rows; the bits are those of `weight_gradient` for each entry.
    """
    total = stacked.matmul(x, g, contract=MatmulContract(contract.rows), transpose_x=True)
    return _from_zero(total)


def _from_zero(total: jax.Array) -> jax.Array:
    """Adds to a zero, as sums of several chunks do, which maps -0 to +0."""
    # XLA would fold a constant zero.
    return isolate(jnp.zeros((), jnp.float32))[0] + total
