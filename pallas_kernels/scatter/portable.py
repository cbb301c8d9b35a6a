"""Scatters that combine windows of updates into an array sequentially, on any platform that JAX runs on."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import FoldContract, honour
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.lanes import Combine
from pallas_kernels.parts.xla.tiles import isolate


def scatter_windows(
    x: jax.Array,
    starts: jax.Array,
    inside: jax.Array,
    updates: jax.Array,
    *,
    combine: Combine,
    contract: FoldContract,
) -> jax.Array:
    """Combines each window of updates with the part of `x` at its start, in ascending order.

    Args:
        x: Array of any shape, float32, bfloat16, float16 or float64.
        starts: (M, rank of x) int32, where the windows start.
        inside: (M,) bool, which windows to apply; the others are ignored.
        updates: (M, ...) of the dtype of `x`, windows of the rank of `x`.
        combine: One correctly rounded operation on the elements of `x` and of a window.
        contract: Order of the operations.

    Returns:
        An array of the shape and dtype of `x`, each element rounded once.

    Raises:
        UnsupportedError: If the dtype is not one of these.

    Guarantee: an element depends on the updates that meet it alone, and on their order.

    Example:
        >>> starts, inside = jnp.array([[2], [0], [2]]), jnp.array([True, True, True])
        >>> updates = jnp.array([[1.0], [2.0], [4.0]])
        >>> along = {"combine": lax.add, "contract": FoldContract("scatter")}
        >>> scatter_windows(jnp.zeros(3), starts, inside, updates, **along).tolist()
        [2.0, 0.0, 5.0]
    """
    honour("scatter", contract, FoldContract("scatter"))
    if 0 in x.shape or 0 in updates.shape:
        return x
    dtype = accumulator("scatter", x.dtype)
    sums, updates = isolate(x.astype(dtype), updates.astype(dtype))
    window = updates.shape[1:]

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        start = tuple(starts[i])
        here = lax.dynamic_slice(x, start, window)
        changed = combine(here, lax.dynamic_index_in_dim(updates, i, keepdims=False))
        # Not the addition of zero: that would change -0 and denormals.
        return lax.dynamic_update_slice(x, lax.select(lax.broadcast(inside[i], window), changed, here), start)

    sums = lax.fori_loop(jnp.int32(0), jnp.int32(updates.shape[0]), body, sums)
    return isolate(sums)[0].astype(x.dtype)
