"""Products of matrices as chains of plain products and sums, which are element-wise programs to XLA.

XLA chooses the algorithm of a GPU's dot by timing it. An element-wise program has no algorithm to choose: each element
of the result is computed alone, so its bits cannot depend on the number of rows, and the fences that element-wise code
gets when a program is lowered for a GPU keep XLA from contracting products with sums.
"""

import math
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.parts.xla.tiles import FROM_ZERO, DimensionNumbers, isolate

STEP: Final = 32
"""Elements of the sum that one kernel adds. A block must be a multiple of it."""

_FEW: Final = 8
"""Steps up to which there is no loop."""


def rounded_sum(
    x: jax.Array,
    w: jax.Array,
    *,
    dtype: DTypeLike,
    axes: tuple[int, int] = (2, 1),
    block: int | None = None,
    total: jax.Array | None = None,
) -> jax.Array:
    """Adds products over an axis in ascending order, each product and each sum rounded.

    Args:
        x: (G or 1, M, C), or (G or 1, C, M).
        w: (G or 1, C, N), or (G or 1, N, C).
        dtype: Dtype of the products and sums.
        axes: The axes of `x` and `w` with C elements.
        block: Elements of a block, a multiple of 32; the sums of blocks are added in ascending order. One block by
            default.
        total: (G, M, N), to which the blocks are added; zero by default.

    Returns:
        (G, M, N) of `dtype`.

    Example:
        >>> rounded_sum(jnp.ones((1, 2, 3)), jnp.ones((1, 3, 1)), dtype="float32", block=128).tolist()
        [[[3.0], [3.0]]]
    """
    count = x.shape[axes[0]]
    shape = w.shape[0] if x.shape[0] == 1 else x.shape[0], x.shape[3 - axes[0]], w.shape[3 - axes[1]]
    if axes[1] == 2:  # so that neighbouring threads read neighbouring columns
        (w,) = isolate(w.swapaxes(1, 2))
    start = jnp.zeros(shape, dtype) if total is None else total
    steps_of_block = count if block is None else block // STEP
    chain = jnp.zeros(shape, dtype)

    def added(chain: jax.Array, first: jax.Array | int, number: int) -> jax.Array:
        x_part, w_part = (
            lax.dynamic_slice_in_dim(a, first, number, axis, **FROM_ZERO).astype(dtype)
            for a, axis in ((x, axes[0]), (w, 1))
        )
        for i in range(number):
            left = lax.index_in_dim(x_part, i, axes[0], keepdims=False)[:, :, None]
            chain = chain + left * lax.index_in_dim(w_part, i, 1)
        return chain

    def step(i: jax.Array | int, sums: tuple[jax.Array, jax.Array], number: int = STEP) -> tuple[jax.Array, jax.Array]:
        total, chain = sums
        first_of_block = lax.rem(jnp.int32(i), jnp.int32(steps_of_block)) == 0
        # The first block adds a chain of no elements, +0, to a total that is not -0.
        total = jnp.where(first_of_block, total + chain, total)
        chain = jnp.where(first_of_block, jnp.zeros((), dtype), chain)
        new_total, new_chain = isolate(total, added(chain, i * STEP, number))
        return new_total, new_chain

    sums = (start, chain)
    steps = count // STEP
    if steps <= _FEW:
        for i in range(steps):
            sums = step(i, sums)
    else:
        sums = lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, sums)
    if count % STEP:
        sums = step(steps, sums, count % STEP)
    return sums[0] + sums[1]


def rounded_dot(a: jax.Array, b: jax.Array, dimensions: DimensionNumbers) -> jax.Array:
    """Returns `lax.dot_general` of float32 arrays with one contracted axis, as one ascending chain of rounded products.

    Example:
        >>> rounded_dot(jnp.ones((2, 3, 4)), jnp.ones((5, 2, 4)), (((2,), (2,)), ((0,), (1,)))).shape
        (2, 3, 5)
    """
    (contracted, batched) = dimensions
    parts, free = [], []
    for x, (axis,), batch in zip((a, b), contracted, batched, strict=True):
        others = [i for i in range(x.ndim) if i != axis and i not in batch]
        free.append([x.shape[i] for i in others])
        whole = x.transpose(*batch, *others, axis)
        parts.append(whole.reshape(math.prod(x.shape[i] for i in batch), math.prod(free[-1]), x.shape[axis]))
    lead = [a.shape[i] for i in batched[0]]
    return rounded_sum(parts[0], parts[1], dtype=jnp.float32, axes=(2, 2)).reshape(*lead, *free[0], *free[1])
