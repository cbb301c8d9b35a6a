"""The gradient of an embedding by plain additions in a fixed order, invariant on any platform that JAX runs on."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import ChunkContract
from pallas_kernels.parts.xla.tiles import pad_rows


def table_gradient(tokens: jax.Array, g: jax.Array, total: jax.Array, *, contract: ChunkContract) -> jax.Array:
    """Adds each row of `g` to the row of a table that its token names.

    Within a chunk the rows of one token are added upwards; chunk sums are added to the table upwards.

    Args:
        tokens: (M,) int32. Ids outside the table are left out.
        g: (M, D) float32, bfloat16 or float16.
        total: (V, D) float32, where the sum starts.
        contract: Chunks of rows.

    Returns:
        (V, D) float32.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> g = jnp.array([[1.0], [2.0], [4.0]])
        >>> table_gradient(jnp.array([2, 0, 2]), g, jnp.zeros((3, 1)), contract=chunk_contract()).tolist()
        [[2.0], [0.0], [5.0]]
    """
    size, rows = total.shape[0], contract.rows
    chunks = -(-tokens.shape[0] // rows)
    if not chunks:
        return total
    # One more than the id, so that the zeros which pad the last chunk name no row.
    names = pad_rows(jnp.where((tokens >= 0) & (tokens < size), tokens, -1) + 1, chunks * rows).reshape(chunks, rows)
    g = pad_rows(g, chunks * rows).reshape(chunks, rows, g.shape[1])
    # Rows of one token meet in the place of its first row in the chunk. All chunks take a row at a time.
    place = jnp.argmax(names[:, :, None] == names[:, None, :], axis=2).astype(jnp.int32)
    chunk = jnp.arange(chunks, dtype=jnp.int32)

    def add_row(i: jax.Array, sums: jax.Array) -> jax.Array:
        here = lax.dynamic_index_in_dim(place, i, 1, keepdims=False)
        row = lax.dynamic_index_in_dim(g, i, 1, keepdims=False).astype(jnp.float32)
        at = sums.at[chunk, here]
        return at.set(at.get(mode="promise_in_bounds") + row, unique_indices=True, mode="promise_in_bounds")

    sums = lax.fori_loop(jnp.int32(0), jnp.int32(rows), add_row, jnp.zeros(g.shape, jnp.float32))
    first = (place == jnp.arange(rows)) & (names > 0)
    targets = jnp.where(first, names - 1, size)

    def add_chunk(c: jax.Array, total: jax.Array) -> jax.Array:
        return total.at[targets[c]].add(sums[c], mode="drop")

    total = lax.fori_loop(jnp.int32(0), jnp.int32(chunks), add_chunk, total)
    return total
