"""Matmul on any platform: XLA's dot on tiles of one fixed shape, and the chunked sum of outer products.

This is the plain way to invariance: the program never sees the number of rows. It is what a platform gets for which
there is no faster backend; its order over K is the one that XLA gives that single shape.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._tiles import fold_row_chunks, isolate, isolated_dot, map_row_tiles
from pallas_kernels.contract import ChunkContract, MatmulContract

_ROWS = 64


def matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool = False) -> jax.Array:
    """Multiplies rows by weights, 64 rows at a time, block by block of K.

    Args:
        x: (M, K) float32, bfloat16 or float16.
        w: (K, N), or (N, K) with `transpose_w`.
        contract: Blocks of K; inside a block the order is XLA's for the one shape (64, block, N).
        transpose_w: Whether `w` is stored as (N, K).

    Returns:
        (M, N) of the contract's dtype.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import matmul_contract
        >>> c = matmul_contract(2, transpose_w=False)
        >>> matmul(jnp.ones((3, 2)), jnp.ones((2, 1)), contract=c).tolist()
        [[2.0], [2.0], [2.0]]
    """
    (m, k), n = x.shape, w.shape[0 if transpose_w else 1]
    if 0 in (m, k, n):
        return jnp.zeros((m, n), contract.dtype)
    x, w = isolate(x, w)
    cuts = [(start, min(k, start + contract.k_block)) for start in range(0, k, contract.k_block)]
    blocks = [lax.slice_in_dim(w, *cut, axis=1 if transpose_w else 0) for cut in cuts]  # once, not for each tile

    def program(tile: jax.Array) -> tuple[jax.Array]:
        total = jnp.zeros((tile.shape[0], n), contract.dtype)
        dims = (((1,), (1 if transpose_w else 0,)), ((), ()))
        for (start, stop), block in zip(cuts, blocks, strict=True):
            partial = isolated_dot(
                tile[:, start:stop],
                block,
                dims,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=contract.dtype,
            )
            total = total + partial if start else partial
        return (total,)

    out = jax.ShapeDtypeStruct((n,), contract.dtype)
    return map_row_tiles(lambda _: program, lambda _: _ROWS, [x], [out])[0]


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
        contract: Chunks of rows.
        transpose_w: Whether the gradient is wanted as (N, K).
        accumulate: A previous sum of the result's shape, float32, whose chain is continued.

    Returns:
        (K, N) float32, or (N, K) with `transpose_w`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    left, right = (g, x) if transpose_w else (x, g)
    left, right = (a.astype(jnp.float32) for a in isolate(left, right))
    shape = (left.shape[1], right.shape[1])
    total = jnp.zeros(shape, jnp.float32) if accumulate is None else accumulate
    if 0 in shape:
        return total

    def outer(a: jax.Array, b: jax.Array) -> jax.Array:
        return isolated_dot(a, b, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)

    return fold_row_chunks(outer, [left, right], contract.rows, total)


def stacked_matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool = False) -> jax.Array:
    """Multiplies the rows of every entry of a stack by the entry's weights, one entry after the other.

    Args:
        x: (G, M, K) float32, bfloat16 or float16.
        w: (G, K, N), or (G, N, K) with `transpose_w`.
        contract: Blocks of K.
        transpose_w: Whether `w` is stored as (G, N, K).

    Returns:
        (G, M, N) float32.

    Guarantee: row-invariant.
    """

    def one(entry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return matmul(*entry, contract=contract, transpose_w=transpose_w)

    out: jax.Array = lax.map(one, (x, w))
    return out


def stacked_weight_gradient(x: jax.Array, g: jax.Array, *, contract: ChunkContract) -> jax.Array:
    """Sums the outer products of the rows of every entry of a stack, one entry after the other.

    Args:
        x: (G, M, K) float32, bfloat16 or float16.
        g: (G, M, N).
        contract: Chunks of rows.

    Returns:
        (G, K, N) float32.

    Guarantee: split-invariant in the rows.
    """
    out: jax.Array = lax.map(lambda entry: weight_gradient(*entry, contract=contract), (x, g))
    return out
