"""Stacks of tiny products as one element-wise program over all entries, instead of one library call per entry."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.xla.opaque import opaque_zero
from pallas_kernels.parts.xla.tiles import isolate


def chain(x: jax.Array, w: jax.Array, *, transpose_x: bool, transpose_w: bool) -> jax.Array:
    """Adds the products of one element of K after another, for all elements of all entries at once.

    Args:
        x: (G, M, K), or (G, K, M) with `transpose_x`, in the dtype of the sums.
        w: (G, K, N), or (G, N, K) with `transpose_w`.
        transpose_x: Whether `x` is stored as (G, K, M).
        transpose_w: Whether `w` is stored as (G, N, K).

    Returns:
        (G, M, N). LLVM contracts each product and the sum to a fused multiply-add, as it does in a dot.
    """
    x, w = _in_one_layout(x), _in_one_layout(w)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    # XLA would fold a constant zero, and a product -0 would stay -0.
    total = lax.bitcast_convert_type(opaque_zero().astype(unsigned), x.dtype)
    for i in range(x.shape[1 if transpose_x else 2]):
        left = lax.index_in_dim(x, i, 1 if transpose_x else 2, keepdims=False)[:, :, None]
        right = lax.index_in_dim(w, i, 2 if transpose_w else 1, keepdims=False)[:, None, :]
        total = left * right + total
    return _in_one_layout(total)


def _in_one_layout(a: jax.Array) -> jax.Array:
    """Returns the array and keeps the surrounding code from changing the layout of its producers and consumers."""
    # A flat array has only one layout. Without the other barriers, the loop would decompose its indices.
    (flat,) = isolate(isolate(a)[0].reshape(-1))
    return isolate(flat.reshape(a.shape))[0]
