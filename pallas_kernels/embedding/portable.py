"""The gradient of an embedding by additions in a fixed order, invariant on any platform that JAX runs on."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import ChunkContract
from pallas_kernels.parts.xla.tiles import FROM_ZERO, pad_rows


def table_gradient(tokens: jax.Array, g: jax.Array, total: jax.Array, *, contract: ChunkContract) -> jax.Array:
    """Adds each row of `g` to the table row of its token.

    Within a chunk the rows of a token are added in ascending order, and so are the chunk sums to the table.

    Args:
        tokens: (M,) int32. Ids outside the table are ignored.
        g: (M, D) float32, bfloat16 or float16.
        total: (V, D) float32, bfloat16 or float16, the initial value of the sum.
        contract: Chunks of rows.

    Returns:
        (V, D) of the dtype of `total`; sums are computed in float32 and rounded once.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows and a float32 `total`.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> g = jnp.array([[1.0], [2.0], [4.0]])
        >>> table_gradient(jnp.array([2, 0, 2]), g, jnp.zeros((3, 1)), contract=chunk_contract()).tolist()
        [[2.0], [0.0], [5.0]]
    """
    if not tokens.shape[0]:
        return total
    names, place = places(tokens, total.shape[0], contract)
    chunks, rows = names.shape
    g = pad_rows(g, chunks * rows).reshape(chunks, rows, g.shape[1])
    chunk = jnp.arange(chunks, dtype=jnp.int32)

    def add_row(i: jax.Array, sums: jax.Array) -> jax.Array:
        here = lax.dynamic_index_in_dim(place, i, 1, keepdims=False, **FROM_ZERO)
        row = lax.dynamic_index_in_dim(g, i, 1, keepdims=False, **FROM_ZERO).astype(jnp.float32)
        at = sums.at[chunk, here]
        return at.set(at.get(mode="promise_in_bounds") + row, unique_indices=True, mode="promise_in_bounds")

    sums = lax.fori_loop(jnp.int32(0), jnp.int32(rows), add_row, jnp.zeros(g.shape, jnp.float32))
    first = (place == jnp.arange(rows)) & (names > 0)
    targets = jnp.where(first, names - 1, total.shape[0])

    def add_chunk(c: jax.Array, total: jax.Array) -> jax.Array:
        return total.at[targets[c]].add(sums[c], mode="drop")

    wide: jax.Array = lax.fori_loop(jnp.int32(0), jnp.int32(chunks), add_chunk, total.astype(jnp.float32))
    return wide.astype(total.dtype)


def places(tokens: jax.Array, size: int, contract: ChunkContract) -> tuple[jax.Array, jax.Array]:
    """Returns, in chunks of rows, token + 1 (0 outside the table), and the first place in the chunk of each token.

    Args:
        tokens: (M,) int32, M above 0.
        size: Rows of the table.
        contract: Chunks of rows.

    Returns:
        Two (chunks, rows) int32 arrays: the tokens, padded with zeros; and for each place, the first place in its chunk
        with the same token.
    """
    rows = contract.rows
    chunks = -(-tokens.shape[0] // rows)
    names = pad_rows(jnp.where((tokens >= 0) & (tokens < size), tokens, -1) + 1, chunks * rows).reshape(chunks, rows)
    return names, jnp.argmax(names[:, :, None] == names[:, None, :], axis=2).astype(jnp.int32)
