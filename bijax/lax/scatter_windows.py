"""Canonicalises `ScatterDimensionNumbers`: a list of full-rank windows, and their starts."""

import math
from typing import Any, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Parameters(TypedDict, total=False):
    """The parameters of JAX's scatter primitives.

    Attributes:
        dimension_numbers: As in `jax.lax.scatter_add`.
        mode: As in `jax.lax.scatter_add`. A window out of bounds is dropped, or moved inside by "clip".
        unique_indices: A promise that no windows overlap.
        indices_are_sorted: A promise that helps XLA's own scatter alone.
        update_jaxpr: Not used; a scatter with a function of its own is `scatter_apply`.
        update_consts: Not used.
    """

    dimension_numbers: Required[lax.ScatterDimensionNumbers]
    mode: Required[Any]
    unique_indices: bool
    indices_are_sorted: bool
    update_jaxpr: Any
    update_consts: Any


def as_windows(updates: jax.Array, ndim: int, numbers: lax.ScatterDimensionNumbers) -> jax.Array:
    """Returns the updates as (M, ...), windows of `ndim` axes in row-major order of their indices."""
    order = [a for a in range(updates.ndim) if a not in numbers.update_window_dims]
    count = math.prod(updates.shape[a] for a in order)
    window = iter(updates.shape[a] for a in numbers.update_window_dims)
    left_out = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    shape = tuple(1 if a in left_out else next(window) for a in range(ndim))
    return updates.transpose((*order, *numbers.update_window_dims)).reshape(count, *shape)


def window_starts(
    indices: jax.Array, shape: tuple[int, ...], window: tuple[int, ...], numbers: lax.ScatterDimensionNumbers, mode: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the start of every window, (M, rank) int32, and whether the window is inside, (M,)."""
    lead = indices.shape[:-1]
    largest = np.iinfo(indices.dtype).max
    count = math.prod(lead)
    if not shape:
        return jnp.zeros((count, 0), jnp.int32), jnp.ones(count, bool)
    columns = [jnp.zeros(lead, jnp.int32)] * len(shape)
    inside = jnp.ones(lead, bool)
    for i, axis in enumerate(numbers.scatter_dims_to_operand_dims):
        if shape[axis] < window[axis]:  # an axis of length 0
            inside = jnp.zeros(lead, bool)
            continue
        last = jnp.asarray(min(shape[axis] - window[axis], largest), indices.dtype)
        start = indices[..., i]
        if mode == lax.GatherScatterMode.CLIP:
            start = lax.clamp(jnp.zeros((), indices.dtype), start, last)
        fits = (start >= 0) & (start <= last)
        columns[axis] = jnp.where(fits, start, 0).astype(jnp.int32)
        inside &= fits
    for axis, along in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        columns[axis] = lax.broadcasted_iota(jnp.int32, lead, along)
    return jnp.stack(columns, -1).reshape(count, len(shape)), inside.reshape(count)


def gather_windows(
    x: jax.Array, indices: jax.Array, shape: tuple[int, ...], numbers: lax.ScatterDimensionNumbers
) -> jax.Array:
    """Returns the windows that a scatter writes; dropped windows hold arbitrary elements of the array."""
    left_out = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = iter(shape[a] for a in numbers.update_window_dims)
    return lax.gather(
        x,
        indices,
        lax.GatherDimensionNumbers(
            offset_dims=tuple(numbers.update_window_dims),
            collapsed_slice_dims=tuple(numbers.inserted_window_dims),
            start_index_map=tuple(numbers.scatter_dims_to_operand_dims),
            operand_batching_dims=tuple(numbers.operand_batching_dims),
            start_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
        ),
        slice_sizes=[1 if a in left_out else next(window) for a in range(x.ndim)],
        mode=lax.GatherScatterMode.CLIP,
    )


def apart(indices: jax.Array, numbers: lax.ScatterDimensionNumbers) -> bool:
    """Returns whether every entry of the batch has one window, as in the gradient of `jnp.take_along_axis`."""
    lead = indices.shape[:-1]
    return all(n == 1 for a, n in enumerate(lead) if a not in numbers.scatter_indices_batching_dims)
