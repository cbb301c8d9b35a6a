"""Scatters that select values, with the operands and parameters of JAX's own primitives.

XLA:CPU applies updates one after another; `scatter` is for GPUs, where XLA writes them all at once. `scatter_max` and
`scatter_min` are for both: whether XLA:CPU flushes subnormal numbers to zero depends on its loop.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.lax.scatter_windows import as_windows, window_starts
from pallas_kernels.scatter.chosen import extreme_windows, overwrite_windows

_Numbers = lax.ScatterDimensionNumbers


def scatter(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    dimension_numbers: _Numbers,
    mode: Any,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    update_jaxpr: Any = None,
    update_consts: Any = (),
) -> jax.Array:
    """Overwrites windows of an array by updates; where they overlap, the last one wins.

    Args:
        operand: Array of any shape and dtype.
        indices: Integers; the last axis holds the start of one window.
        updates: Windows of the dtype of `operand`.
        dimension_numbers: As in `jax.lax.scatter`.
        mode: As in `jax.lax.scatter`. A window out of bounds is dropped, or moved inside by "clip".
        unique_indices: A promise that no windows overlap; then XLA's scatter is used.
        indices_are_sorted: Passed on to XLA's own scatter.
        update_jaxpr: None; a scatter that has one is `scatter_apply`.
        update_consts: Not used.

    Returns:
        An array of the shape and dtype of `operand`.

    Raises:
        UnsupportedError: If windows may overlap in part and hold more than 2**31 - 1 elements.

    Guarantee: an element is that of the last window that meets it, whatever else is written, with the bits of XLA:CPU.

    Example:
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter(jnp.zeros(3), jnp.array([[2], [0], [2]]), jnp.array([1.0, 2.0, 4.0]),
        ...         dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [2.0, 0.0, 4.0]
    """
    del update_jaxpr, update_consts
    mode = lax.GatherScatterMode.from_any(mode)
    if unique_indices and mode != lax.GatherScatterMode.CLIP:  # clipped windows may overlap
        return lax.scatter(
            operand,
            indices,
            updates,
            dimension_numbers,
            mode=mode,
            unique_indices=True,
            indices_are_sorted=indices_are_sorted,
        )
    return overwrite_windows(*_windows(operand, indices, updates, dimension_numbers, mode)).reshape(operand.shape)


def scatter_max(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    dimension_numbers: _Numbers,
    mode: Any,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    update_jaxpr: Any = None,
    update_consts: Any = (),
) -> jax.Array:
    """Returns the maximum of an array's elements and the updates at their positions.

    Args:
        operand: Array of any shape, of a floating dtype.
        indices: As in `scatter`.
        updates: As in `scatter`.
        dimension_numbers: As in `scatter`.
        mode: As in `scatter`.
        unique_indices: Not used.
        indices_are_sorted: Not used.
        update_jaxpr: Not used.
        update_consts: Not used.

    Returns:
        An array of the shape and dtype of `operand`. +0 is larger than -0, and nan wins: that of the operand unchanged,
        that of an update as the positive quiet nan.

    Raises:
        UnsupportedError: If no order of the dtype is defined.

    Guarantee: an element depends on its start and on the updates that meet it alone, in any order. The bits are
    those of XLA:CPU, but for the sign and payload of nans and for denormals, which XLA:CPU takes for zeros.

    Example:
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter_max(jnp.zeros(2), jnp.array([[1], [1]]), jnp.array([4.0, 3.0]),
        ...             dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [0.0, 4.0]
    """
    del unique_indices, indices_are_sorted, update_jaxpr, update_consts
    return _extreme(operand, indices, updates, dimension_numbers, mode, smallest=False)


def scatter_min(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    dimension_numbers: _Numbers,
    mode: Any,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    update_jaxpr: Any = None,
    update_consts: Any = (),
) -> jax.Array:
    """Returns the minimum of an array's elements and the updates at their positions; see `scatter_max`.

    Guarantee: an element depends on its start and on the updates that meet it alone, in any order.

    Example:
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter_min(jnp.zeros(2), jnp.array([[1], [1]]), jnp.array([-4.0, -3.0]),
        ...             dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [0.0, -4.0]
    """
    del unique_indices, indices_are_sorted, update_jaxpr, update_consts
    return _extreme(operand, indices, updates, dimension_numbers, mode, smallest=True)


def _extreme(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, numbers: _Numbers, mode: Any, *, smallest: bool
) -> jax.Array:
    mode = lax.GatherScatterMode.from_any(mode)
    windows = _windows(operand, indices, updates, numbers, mode)
    return extreme_windows(*windows, smallest=smallest).reshape(operand.shape)


def _windows(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, numbers: _Numbers, mode: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the array, the starts of the windows, whether they are inside, and the windows."""
    windows = as_windows(updates, operand.ndim, numbers)
    starts, inside = window_starts(indices, operand.shape, windows.shape[1:], numbers, mode)
    if operand.ndim == 0:  # XLA fails to compile a windowed scatter into a scalar
        return operand[None], jnp.zeros((len(windows), 1), jnp.int32), inside, windows[:, None]
    return operand, starts, inside, windows
