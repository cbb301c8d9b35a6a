"""Scatters in which one update wins, run in parallel with an integer maximum, which is exact in any order.

A GPU writes all updates concurrently. Where several overlap, the winner would vary from run to run.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.total_order import from_ordered, to_ordered
from pallas_kernels.parts.xla.window_numbers import gathered, scattered

_DROP = lax.GatherScatterMode.FILL_OR_DROP
_LARGEST = np.iinfo(np.int32).max


def overwrite_windows(x: jax.Array, starts: jax.Array, inside: jax.Array, updates: jax.Array) -> jax.Array:
    """Overwrites parts of `x` by windows of updates; where windows overlap, the last one wins.

    Args:
        x: Array of any shape and dtype.
        starts: (M, rank of x) int32, where the windows start.
        inside: (M,) bool, which windows to take; the others change nothing.
        updates: (M, ...) of the dtype of `x`, windows of the rank of `x`.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        UnsupportedError: If windows may overlap in part and hold more than 2**31 - 1 elements.

    Guarantee: an element is that of the last window that meets it, whatever else is written.

    Example:
        >>> starts, inside = jnp.array([[2], [0], [2]]), jnp.array([True, True, True])
        >>> overwrite_windows(jnp.zeros(3), starts, inside, jnp.array([[1.0], [2.0], [4.0]])).tolist()
        [2.0, 0.0, 4.0]
    """
    if 0 in x.shape or 0 in updates.shape:
        return x
    count, window = updates.shape[0], updates.shape[1:]
    whole = [n == size for n, size in zip(window, x.shape, strict=True)]
    cell, grid = window, x.shape
    if all(n == 1 or w for n, w in zip(window, whole, strict=True)):
        # Two windows are equal or disjoint, so one number per window is enough.
        cell, grid = (1,) * x.ndim, tuple(1 if w else size for w, size in zip(whole, x.shape, strict=True))
    numbered = count * math.prod(cell)
    if numbered > _LARGEST:
        raise UnsupportedError(
            f"scatter: expected windows of at most {_LARGEST} elements in all where they may overlap in part, got"
            f" {updates.dtype.name}{list(updates.shape)} into {x.dtype.name}{list(x.shape)}; scatter them in parts, or"
            " promise unique_indices=True if no two meet."
        )
    starts = _marked(starts, inside)
    numbers = lax.iota(jnp.int32, numbered).reshape(count, *cell)
    last = lax.scatter_max(jnp.full(grid, -1, jnp.int32), starts, numbers, scattered(x.ndim), mode=_DROP)
    winners = lax.gather(last, starts, gathered(x.ndim), cell, mode=lax.GatherScatterMode.CLIP)
    parts = updates.reshape(numbered, math.prod(updates.shape) // numbered)
    # Overlapping windows now hold the same values there, so the order of the writes does not matter.
    agreed = jnp.take(parts, winners.reshape(numbered), axis=0, mode="clip").reshape(updates.shape)
    return lax.scatter(x, starts, agreed, scattered(x.ndim), mode=_DROP)


def extreme_windows(
    x: jax.Array, starts: jax.Array, inside: jax.Array, updates: jax.Array, *, smallest: bool
) -> jax.Array:
    """Returns the maximum or minimum of each element of `x` and the updates that overlap it.

    Args:
        x: Array of any shape, of a dtype of `pallas_kernels.parts.xla.total_order.to_ordered`.
        starts: (M, rank of x) int32, where the windows start.
        inside: (M,) bool, which windows to take; the others change nothing.
        updates: (M, ...) of the dtype of `x`, windows of the rank of `x`.
        smallest: Whether to take the smallest.

    Returns:
        An array of the shape and dtype of `x`. +0 is larger than -0, and nan wins: a nan of `x` is returned unchanged,
        a nan of an update as the positive quiet nan.

    Raises:
        UnsupportedError: If no order of the dtype is defined.

    Guarantee: an element depends on its start and on the updates that meet it alone, in any order.

    Example:
        >>> starts, inside = jnp.array([[2], [0], [2]]), jnp.array([True, True, True])
        >>> updates = jnp.array([[4.0], [2.0], [1.0]])
        >>> extreme_windows(jnp.zeros(3), starts, inside, updates, smallest=False).tolist()
        [2.0, 0.0, 4.0]
    """
    before = to_ordered(x, nan_first=smallest)
    if 0 in x.shape or 0 in updates.shape:
        return x
    # GPUs have 32-bit and 64-bit atomic maxima only.
    wide = jnp.int64 if before.dtype == jnp.int64 else jnp.int32
    scatter = lax.scatter_min if smallest else lax.scatter_max
    starts, ordered = _marked(starts, inside), to_ordered(updates, nan_first=smallest)
    after = scatter(before.astype(wide), starts, ordered.astype(wide), scattered(x.ndim), mode=_DROP)
    after = after.astype(before.dtype)
    return lax.select(after == before, x, from_ordered(after, x.dtype, nan_first=smallest))


def _marked(starts: jax.Array, inside: jax.Array) -> jax.Array:
    """Returns the starts, with -1 (before the array) for windows to ignore."""
    return jnp.where(inside[:, None], starts, -1)
