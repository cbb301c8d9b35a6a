"""Matmul as element-wise code: one product and one sum for each step of K, over all elements of the result at once.

XLA's own dot chooses its order by the rows, the columns and the number of products. Element-wise operations are rounded
one by one, so a chain of them has the same bits in any shape, and no operand has to be cut into tiles. It is slow
beside a tensor core; it serves what no other kernel takes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import MatmulContract

_AT_ONCE = 16


def matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool = False) -> jax.Array:
    """Multiplies rows by weights, or the rows of every entry of a stack by the entry's weights.

    Args:
        x: (..., M, K), any floating dtype.
        w: (..., K, N), or (..., N, K) with `transpose_w`, of the same leading dimensions.
        contract: Blocks of K. Each is a chain of products and sums, rounded one by one, upwards; so is the sum over
            blocks. K counts as padded with zeros.
        transpose_w: Whether `w` is stored as (N, K).

    Returns:
        (..., M, N) of the contract's dtype.

    Guarantee: row-invariant, where products are not contracted with sums (as `bijax` lowers it on a GPU).

    Example:
        >>> matmul(jnp.ones((3, 2)), jnp.ones((2, 1)), contract=MatmulContract(128)).tolist()
        [[2.0], [2.0], [2.0]]
    """
    w = jnp.swapaxes(w, -1, -2) if transpose_w else w
    x, w = (a.astype(contract.dtype) for a in (x, w))
    k, zero = x.shape[-1], jnp.zeros((*x.shape[:-1], w.shape[-1]), contract.dtype)
    if 0 in (*x.shape, *w.shape):
        return zero
    length = min(contract.k_block, -(-k // _AT_ONCE) * _AT_ONCE)
    x, w = _padded(x, -1, length), _padded(w, -2, length)
    steps = -(-length // _AT_ONCE)

    def block(i: jax.Array, total: jax.Array) -> jax.Array:
        def step(j: jax.Array, partial: jax.Array) -> jax.Array:
            start = i * length + j * _AT_ONCE
            rows = lax.dynamic_slice_in_dim(x, start, _AT_ONCE, x.ndim - 1)
            columns = lax.dynamic_slice_in_dim(w, start, _AT_ONCE, w.ndim - 2)
            for n in range(_AT_ONCE):
                partial = partial + rows[..., :, n : n + 1] * columns[..., n : n + 1, :]
            return partial

        partial: jax.Array = lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, zero)
        return total + partial

    total: jax.Array = lax.fori_loop(jnp.int32(0), jnp.int32(x.shape[-1] // length), block, zero)
    return total


def _padded(a: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -a.shape[axis] % multiple
    return jnp.pad(a, [(0, missing if d == axis % a.ndim else 0) for d in range(a.ndim)]) if missing else a
