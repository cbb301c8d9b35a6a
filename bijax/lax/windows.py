"""Reductions over sliding windows and the primitives of pooling, with the operands and parameters of JAX's own."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.contracts import run
from pallas_kernels.contract import FoldContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.positions import Window
from pallas_kernels.parts.xla.total_order import has_infinity, largest
from pallas_kernels.windows import portable

_CONTRACT: Final = FoldContract("window")
_Padding = Sequence[tuple[int, int]]


def reduce_window_sum(
    operand: jax.Array,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: _Padding,
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> jax.Array:
    """Adds the elements of sliding windows, in float32 (float64 for float64), axis by axis in ascending order.

    Args:
        operand: Array of any shape, float32, bfloat16, float16 or float64.
        window_dimensions: Elements of the window along each axis.
        window_strides: Distance between windows.
        padding: Zeros before and after each axis.
        base_dilation: Distance between the elements of `operand`, which are separated by zeros.
        window_dilation: Distance between the elements of a window.

    Returns:
        An array of the dtype of `operand`, rounded once.

    Raises:
        UnsupportedError: If the dtype is not one of the four.

    Guarantee: row-invariant. (Rows are windows.)

    Example:
        >>> one = (1,)
        >>> reduce_window_sum(jnp.arange(4.0), window_dimensions=(2,), window_strides=(2,), padding=((0, 0),),
        ...                   base_dilation=one, window_dilation=one).tolist()
        [1.0, 5.0]
    """
    padded = _pad(operand, 0, padding, base_dilation)
    window = _window(window_dimensions, window_strides, window_dilation)
    return run(portable.sum_windows, padded, window=window, contract=_CONTRACT).astype(operand.dtype)


def reduce_window_max(
    operand: jax.Array,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: _Padding,
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> jax.Array:
    """Returns the maxima of sliding windows: nan where a window holds one, +0 rather than -0.

    The arguments are as in `reduce_window_sum`, with the dtypes of `pallas_kernels.rows.fold.choose_axis`;
    padding and holes count as -inf, or as the smallest number where a dtype has no infinities.

    Raises:
        UnsupportedError: If the dtype is not one of these.

    Guarantee: row-invariant. (Rows are windows.)

    Example:
        >>> one = (1,)
        >>> reduce_window_max(jnp.arange(4.0), window_dimensions=(2,), window_strides=(2,), padding=((0, 0),),
        ...                   base_dilation=one, window_dilation=one).tolist()
        [1.0, 3.0]
    """
    padded = _pad(operand, -largest(operand.dtype), padding, base_dilation)
    window = _window(window_dimensions, window_strides, window_dilation)
    return portable.choose_in_windows(padded, window=window, smallest=False)


def reduce_window_min(
    operand: jax.Array,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: _Padding,
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> jax.Array:
    """Returns the minima of sliding windows: nan where a window holds one, -0 rather than +0.

    The arguments are as in `reduce_window_max`; padding and holes count as +inf, or as the largest number where a
    dtype has no infinities.

    Raises:
        UnsupportedError: If the dtype is not one of these.

    Guarantee: row-invariant. (Rows are windows.)

    Example:
        >>> one = (1,)
        >>> reduce_window_min(jnp.arange(4.0), window_dimensions=(2,), window_strides=(1,), padding=((1, 0),),
        ...                   base_dilation=one, window_dilation=one).tolist()
        [0.0, 0.0, 1.0, 2.0]
    """
    padded = _pad(operand, largest(operand.dtype), padding, base_dilation)
    window = _window(window_dimensions, window_strides, window_dilation)
    return portable.choose_in_windows(padded, window=window, smallest=True)


def select_and_scatter_add(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: _Padding,
) -> jax.Array:
    """Adds the value of every window to the place of its first maximum or minimum: the gradient of max pooling.

    Args:
        source: One value for each window, float32, bfloat16, float16 or float64.
        operand: Array from which to choose, of a floating dtype.
        select_prim: `jax.lax.ge_p` for the maximum, `jax.lax.le_p` for the minimum.
        window_dimensions: Elements of the window along each axis.
        window_strides: Distance between windows.
        padding: Elements that are never chosen, before and after each axis; negative numbers cut elements off.

    Returns:
        An array of the shape of `operand` and the dtype of `source`. Values that meet in one place are added in
        float32 (float64 for float64), in the order of that place in their windows, and rounded once.

    Raises:
        UnsupportedError: If the dtype of `source` is not one of the four.

    Guarantee: row-invariant. (A row is an element and the windows around it.)

    Example:
        >>> x = jnp.array([3.0, 1.0, 2.0, 4.0])
        >>> select_and_scatter_add(jnp.array([7.0, 8.0]), x, select_prim=lax.ge_p, window_dimensions=(2,),
        ...                        window_strides=(2,), padding=((0, 0),)).tolist()
        [7.0, 0.0, 0.0, 8.0]
    """
    smallest = select_prim is lax.le_p
    padded = _pad(operand, jnp.inf if smallest else -jnp.inf, padding, (1,) * operand.ndim)
    window = _window(window_dimensions, window_strides, (1,) * operand.ndim)
    total = run(portable.scatter_selected, source, padded, window=window, smallest=smallest, contract=_CONTRACT)
    # An element that negative padding cut off belongs to no window.
    return _pad(total, 0, [(-low, -high) for low, high in padding], (1,) * operand.ndim).astype(source.dtype)


def select_and_gather_add(
    tangents: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: _Padding,
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> jax.Array:
    """Returns from every window the tangent at the place of its first maximum or minimum; nothing is added.

    Args:
        tangents: Array of the shape of `operand`.
        operand: Array from which to choose, of a floating dtype with infinities.
        select_prim: `jax.lax.ge_p` for the maximum, `jax.lax.le_p` for the minimum.
        window_dimensions: Elements of the window along each axis.
        window_strides: Distance between windows.
        padding: Elements that are never chosen, before and after each axis.
        base_dilation: Distance between the elements of `operand`, which are separated by such elements.
        window_dilation: Distance between the elements of a window.

    Returns:
        One tangent for each window, of the dtype of `tangents`.

    Raises:
        UnsupportedError: If the dtype of `operand` has no infinities.

    Guarantee: row-invariant. (Rows are windows.)

    Example:
        >>> x, one = jnp.array([3.0, 1.0, 2.0, 4.0]), (1,)
        >>> select_and_gather_add(10 * x, x, select_prim=lax.ge_p, window_dimensions=(2,), window_strides=(2,),
        ...                       padding=((0, 0),), base_dilation=one, window_dilation=one).tolist()
        [30.0, 40.0]
    """
    if not has_infinity(operand.dtype):
        raise UnsupportedError(
            "select_and_gather_add: expected an operand whose dtype has infinities, which lose every choice, got"
            f" {operand.dtype.name}; convert the operand to bfloat16 or a wider dtype."
        )
    smallest = select_prim is lax.le_p
    padded = _pad(operand, jnp.inf if smallest else -jnp.inf, padding, base_dilation)
    values = _pad(tangents, 0, padding, base_dilation)
    window = _window(window_dimensions, window_strides, window_dilation)
    return portable.gather_selected(values, padded, window=window, smallest=smallest)


def _window(size: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> Window:
    return Window(tuple(size), tuple(strides), tuple(dilation))


def _pad(x: jax.Array, value: float, padding: _Padding, base_dilation: Sequence[int]) -> jax.Array:
    config = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, base_dilation, strict=True)]
    return lax.pad(x, jnp.asarray(value, x.dtype), config)
