"""Scatters that multiply complex numbers."""

from typing import Any

import jax
from jax import lax

from bijax.lax.scatter_windows import apart, as_windows, gather_windows, window_starts


def scatter_mul(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    dimension_numbers: lax.ScatterDimensionNumbers,
    mode: Any,
    unique_indices: bool = False,
    **_: Any,
) -> jax.Array:
    """Multiplies windows of an array by updates, as `jax.lax.scatter_mul` does, in the order of their indices.

    Disjoint windows are gathered, multiplied and written back at once; others one after another.
    """
    if operand.size == 0:  # no window fits into it
        return operand
    mode = lax.GatherScatterMode.from_any(mode)
    if apart(indices, dimension_numbers) or (unique_indices and mode != lax.GatherScatterMode.CLIP):
        windows = gather_windows(operand, indices, updates.shape, dimension_numbers) * updates
        return lax.scatter(operand, indices, windows, dimension_numbers, mode=mode, unique_indices=True)
    updates = as_windows(updates, operand.ndim, dimension_numbers)
    starts, inside = window_starts(indices, operand.shape, updates.shape[1:], dimension_numbers, mode)

    def step(i: jax.Array, result: jax.Array) -> jax.Array:
        start = [starts[i, axis] for axis in range(operand.ndim)]
        window = lax.dynamic_slice(result, start, updates.shape[1:])
        window = lax.select(lax.broadcast(inside[i], window.shape), window * updates[i], window)
        return lax.dynamic_update_slice(result, window, start)

    return lax.fori_loop(0, updates.shape[0], step, operand)
