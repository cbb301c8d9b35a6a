"""The transpose of broadcasting, by sums of fixed order."""

import math

import jax
import jax.numpy as jnp

from bijax.ops.rows.reductions import sum as fixed_sum
from bijax.ops.rows.sum_rows import sum_rows


def sum_to_shape(g: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Adds the elements of `g` that one element of an array of `shape` was broadcast to.

    Leading axes are added in chunks of 128 rows (`pallas_kernels.contract.ChunkContract`), so that the gradients of
    parameters are split-invariant; other axes, and all of them for an array of one element, in the order of a row.

    Args:
        g: Array of a shape to which `shape` broadcasts; float32, bfloat16 or float16.
        shape: Shape of the result.

    Returns:
        An array of `shape` in the dtype of `g`, summed in float32.
    """
    dtype = g.dtype
    full = (1,) * (g.ndim - len(shape)) + shape
    axes = [a for a, n in enumerate(full) if n == 1 and g.shape[a] != 1]
    if axes and math.prod(shape) != 1:
        leading = next((a for a in range(g.ndim) if full[a] != 1), g.ndim)
        rest = g.shape[leading:]
        if leading in range(1, g.ndim) and math.prod(g.shape[:leading]) != 1:
            g = sum_rows(g.reshape(math.prod(g.shape[:leading]), math.prod(rest))).reshape(*(1,) * leading, *rest)
            axes = [a for a in axes if a >= leading]
    return fixed_sum(g.astype(jnp.float32), axes, keepdims=True).astype(dtype).reshape(shape)
