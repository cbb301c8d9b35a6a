"""Stacks of tiny products as one element-wise program over all entries, instead of one library call per entry.

The bits rest on LLVM, which contracts each product and the sum. It does so in a program of its own, but not always
where XLA:CPU compiles a small loop, body included, to one LLVM function: there it may vectorise the products over K,
apart from the sums. A loop that sorts is not compiled in this way, so a chain sorts two numbers.
"""

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
    # XLA would fold a constant zero, and a product -0 would stay -0.
    total = lax.bitcast_convert_type(_zero(x, w), x.dtype)
    for i in range(x.shape[1 if transpose_x else 2]):
        left = lax.index_in_dim(x, i, 1 if transpose_x else 2, keepdims=False)[:, :, None]
        right = lax.index_in_dim(w, i, 2 if transpose_w else 1, keepdims=False)[:, None, :]
        total = left * right + total
    return _in_one_layout(total)


def _zero(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns a zero that is known after a sort; it stays in a loop in which either array changes."""
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    two = jnp.stack([lax.bitcast_convert_type(a[0, 0, 0], unsigned) for a in (x, w)])
    smaller, larger = lax.sort(two)
    return opaque_zero().astype(unsigned) | (smaller > larger).astype(unsigned)


def _in_one_layout(a: jax.Array) -> jax.Array:
    """Returns the array and keeps the surrounding code from changing the layout of its producers and consumers."""
    # A flat array has only one layout. Without the other barriers, the loop would decompose its indices.
    (flat,) = isolate(isolate(a)[0].reshape(-1))
    return isolate(flat.reshape(a.shape))[0]
