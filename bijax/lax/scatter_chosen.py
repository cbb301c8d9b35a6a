"""Scatters that select values, with the operands and parameters of JAX's own primitives.

XLA:CPU applies updates one after another; `scatter` is for GPUs, where XLA writes them all at once. `scatter_max` and
`scatter_min` are for both: whether XLA:CPU flushes subnormal numbers to zero depends on its loop.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from bijax.lax.scatter_windows import Parameters, as_windows, window_starts
from pallas_kernels.scatter.chosen import extreme_windows, overwrite_windows


def scatter(operand: jax.Array, indices: jax.Array, updates: jax.Array, **parameters: Unpack[Parameters]) -> jax.Array:
    """Overwrites windows of an array by updates; where they overlap, the last one wins.

    Args:
        operand: Array of any shape and dtype.
        indices: Integers; the last axis holds the start of one window.
        updates: Windows of the dtype of `operand`.
        **parameters: Those of the primitive. With unique indices XLA's own scatter is used.

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
    mode = lax.GatherScatterMode.from_any(parameters["mode"])
    if parameters.get("unique_indices", False) and mode != lax.GatherScatterMode.CLIP:  # clipped windows may overlap
        is_sorted = parameters.get("indices_are_sorted", False)
        options: dict[str, Any] = {"mode": mode, "unique_indices": True, "indices_are_sorted": is_sorted}
        return lax.scatter(operand, indices, updates, parameters["dimension_numbers"], **options)
    return overwrite_windows(*_windows(operand, indices, updates, parameters)).reshape(operand.shape)


def scatter_max(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, **parameters: Unpack[Parameters]
) -> jax.Array:
    """Returns the maximum of an array's elements and the updates at their positions.

    Args:
        operand: Array of any shape, of a floating dtype.
        indices: As in `scatter`.
        updates: As in `scatter`.
        **parameters: Those of the primitive.

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
    return _extreme(operand, indices, updates, parameters, smallest=False)


def scatter_min(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, **parameters: Unpack[Parameters]
) -> jax.Array:
    """Returns the minimum of an array's elements and the updates at their positions; see `scatter_max`.

    Guarantee: an element depends on its start and on the updates that meet it alone, in any order.

    Example:
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter_min(jnp.zeros(2), jnp.array([[1], [1]]), jnp.array([-4.0, -3.0]),
        ...             dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [0.0, -4.0]
    """
    return _extreme(operand, indices, updates, parameters, smallest=True)


def _extreme(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, parameters: Parameters, *, smallest: bool
) -> jax.Array:
    windows = _windows(operand, indices, updates, parameters)
    return extreme_windows(*windows, smallest=smallest).reshape(operand.shape)


def _windows(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, parameters: Parameters
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the array, the starts of the windows, whether they are inside, and the windows."""
    numbers, mode = parameters["dimension_numbers"], lax.GatherScatterMode.from_any(parameters["mode"])
    windows = as_windows(updates, operand.ndim, numbers)
    starts, inside = window_starts(indices, operand.shape, windows.shape[1:], numbers, mode)
    if operand.ndim == 0:  # XLA fails to compile a windowed scatter into a scalar
        return operand[None], jnp.zeros((len(windows), 1), jnp.int32), inside, windows[:, None]
    return operand, starts, inside, windows
