"""The gradient of an embedding with all tokens processed in parallel: for a GPU."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import ChunkContract
from pallas_kernels.embedding.portable import places
from pallas_kernels.parts.xla.rounds import fold_windows


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

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows and a float32 `total`; the bits are those
    of `pallas_kernels.embedding.portable.table_gradient`.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> g = jnp.array([[1.0], [2.0], [4.0]])
        >>> table_gradient(jnp.array([2, 0, 2]), g, jnp.zeros((3, 1)), contract=chunk_contract()).tolist()
        [[2.0], [0.0], [5.0]]
    """
    if not tokens.shape[0] or 0 in total.shape:
        return total
    names, place = places(tokens, total.shape[0], contract)
    chunks, rows = names.shape
    own = jnp.arange(rows, dtype=jnp.int32)

    def add(x: jax.Array, to: jax.Array, taken: jax.Array, updates: jax.Array) -> jax.Array:
        starts = jnp.stack([to, jnp.zeros_like(to)], axis=1)
        return fold_windows(x, starts, taken, updates[:, None], lax.add)

    here = (jnp.arange(chunks, dtype=jnp.int32)[:, None] * rows + place).reshape(-1)[: tokens.shape[0]]
    sums = add(jnp.zeros((chunks * rows, g.shape[1]), jnp.float32), here, jnp.ones(here.shape, bool), g)
    first = (place == own) & (names > 0)
    return add(total, (names - 1).reshape(-1), first.reshape(-1), sums)
