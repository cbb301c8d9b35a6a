"""Folds of rows with equal targets, for all targets in parallel: for a GPU.

A loop over the rows launches kernels for every row. Here the rows are sorted by target; all targets process their
first row in parallel, then targets with more rows process the next few.
"""

import math
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.lanes import Combine
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate, pad_rows
from pallas_kernels.parts.xla.window_numbers import gathered, scattered

_DROP: Final = lax.GatherScatterMode.FILL_OR_DROP
_CLIP: Final = lax.GatherScatterMode.CLIP
_LARGEST: Final = np.iinfo(np.int32).max

AT_ONCE: Final = 8
"""Updates of one target that a step processes."""

STEP: Final = 2**19
"""Approximate number of target elements per step: processing them takes about as long as launching the step."""


def fold_windows(x: jax.Array, starts: jax.Array, inside: jax.Array, updates: jax.Array, combine: Combine) -> jax.Array:
    """Combines windows of updates with the parts of `x` at their starts, in ascending order for each element.

    Args:
        x: Array of any shape, float32, bfloat16, float16 or float64, without an axis of length 0.
        starts: (M, rank of x) int32, where the windows start.
        inside: (M,) bool, which windows to apply; the others are ignored.
        updates: (M, ...), windows of the rank of `x`; along each axis they have one element or all.
        combine: One correctly rounded operation on the elements of `x` and of a window.

    Returns:
        An array of the shape and dtype of `x`, each element rounded once.
    """
    window = updates.shape[1:]
    dtype = accumulator("scatter", x.dtype)
    x, updates = isolate(x, updates)
    order, first, lengths = _targets(starts, inside, window, x.shape)

    def of_windows(rows: jax.Array, numbers: jax.Array) -> jax.Array:
        return jnp.take(rows, numbers, axis=0, mode="clip")

    def update(numbers: jax.Array) -> jax.Array:
        return of_windows(updates, of_windows(order, numbers)).astype(dtype)

    def where(condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        # Not an addition of zero: that would change -0 and denormals.
        return jnp.where(condition.reshape(-1, *(1 for _ in window)), a, b)

    block = min(len(order), max(64, STEP // math.prod(window)))
    blocks = -(-len(order) // block)
    first, lengths = (pad_rows(a, blocks * block) for a in (first, lengths))
    # Unused targets get an index before the array, where nothing is written.
    at = jnp.where((lengths > 0)[:, None], of_windows(starts, of_windows(order, first)), -1)
    sums = combine(lax.gather(x, at, gathered(x.ndim), window, mode=_CLIP).astype(dtype), update(first))

    def left(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        number, taken, _ = state
        return lengths[number * block] > taken  # the longest of its block

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        number, taken, sums = state
        here, start, length = (
            lax.dynamic_slice_in_dim(a, number * block, block, **FROM_ZERO) for a in (sums, first, lengths)
        )
        for i in range(AT_ONCE):
            more = taken + i < length
            here = where(more, combine(here, update(jnp.where(more, start + taken + i, start))), here)
        sums = lax.dynamic_update_slice_in_dim(sums, here, number * block, 0, **FROM_ZERO)
        following = jnp.minimum(number + 1, blocks - 1)
        again = (number + 1 < blocks) & (lengths[following * block] > taken)
        return jnp.where(again, following, 0), jnp.where(again, taken, taken + AT_ONCE), sums

    _, _, sums = lax.while_loop(left, step, (jnp.int32(0), jnp.int32(1), sums))
    result = lax.scatter(x, at, isolate(sums)[0].astype(x.dtype), scattered(x.ndim), unique_indices=True, mode=_DROP)
    return isolate(result)[0]


def _targets(
    starts: jax.Array, inside: jax.Array, window: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts updates by their target.

    Returns:
        The indices of the updates, grouped by target and ascending within a target; for each target, sorted by
        decreasing number of updates, the start of its group; and the number of its updates, 0 for padding. All (M,)
        int32.
    """
    count = starts.shape[0]
    axes = [a for a, (n, size) in enumerate(zip(window, shape, strict=True)) if n == 1 and size > 1]
    grid = [shape[a] for a in axes]
    columns = [starts[:, a] for a in axes] or [jnp.zeros(count, jnp.int32)]
    if math.prod(grid) <= _LARGEST:
        key = columns[0]
        for column, size in zip(columns[1:], grid[1:], strict=True):
            key = key * size + column
        columns = [key]
    columns[0] = jnp.where(inside, columns[0], _LARGEST)
    numbers = jnp.arange(count, dtype=jnp.int32)
    *names, order = lax.sort((*columns, numbers), num_keys=len(columns), is_stable=True)
    changes = jnp.zeros(count - 1, bool)
    for name in names:
        changes |= name[1:] != name[:-1]
    begins = jnp.concatenate([jnp.ones(1, bool), changes])
    first = jnp.sort(jnp.where(begins, numbers, count))
    # The barrier avoids a bug: XLA:CPU of jaxlib 0.12.0.1 miscompiles the fusion with the gather on the next line.
    (ends,) = isolate(jnp.concatenate([first[1:], jnp.full(1, count, jnp.int32)]))
    outside = jnp.take(names[0], first, mode="clip") == _LARGEST
    lengths = jnp.where(outside, 0, ends - first)
    fewest, first = lax.sort((-lengths, first), num_keys=1, is_stable=True)
    return order, first, -fewest
