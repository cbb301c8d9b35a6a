"""Cumulative reductions, with the operands and parameters of JAX's own primitives."""

import functools
import math
from collections.abc import Callable

import jax
from jax import lax

from pallas_kernels.cumulative.tiled import choose_axis, scan_axis


def cumsum(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Adds up every prefix along an axis, in float32 (float64 for float64), rounded once.

    Args:
        operand: Array of any shape, float32, bfloat16, float16 or float64.
        axis: The axis, counted from the front.
        reverse: Whether to add up every suffix, from the end, in its place.

    Returns:
        An array of the shape and dtype of `operand`.

    Raises:
        UnsupportedError: If the dtype is none of the four.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> cumsum(jax.numpy.ones((2, 3)), axis=1, reverse=True)[0].tolist()
        [3.0, 2.0, 1.0]
    """
    return _along(operand, axis, reverse, functools.partial(scan_axis, scan="sum"))


def cumprod(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Multiplies every prefix along an axis; see `cumsum`.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> cumprod(jax.numpy.full(3, 2.0), axis=0, reverse=False).tolist()
        [2.0, 4.0, 8.0]
    """
    return _along(operand, axis, reverse, functools.partial(scan_axis, scan="prod"))


def cumlogsumexp(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Takes the logarithm of the sum of exponentials of every prefix along an axis; see `cumsum`.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> [round(v, 3) for v in cumlogsumexp(jax.numpy.zeros(3), axis=0, reverse=False).tolist()]
        [0.0, 0.693, 1.099]
    """
    return _along(operand, axis, reverse, functools.partial(scan_axis, scan="logsumexp"))


def cummax(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Returns the maximum of every prefix along an axis: nan from the first nan on, +0 rather than -0.

    Args:
        operand: Array of any shape and of any floating dtype.
        axis: The axis, counted from the front.
        reverse: Whether to go from the end to the front.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> cummax(jax.numpy.array([1.0, 3.0, 2.0]), axis=0, reverse=False).tolist()
        [1.0, 3.0, 3.0]
    """
    return _along(operand, axis, reverse, functools.partial(choose_axis, smallest=False))


def cummin(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Returns the minimum of every prefix along an axis: nan from the first nan on, -0 rather than +0; see `cummax`.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> cummin(jax.numpy.array([2.0, 1.0, 3.0]), axis=0, reverse=True).tolist()
        [1.0, 1.0, 3.0]
    """
    return _along(operand, axis, reverse, functools.partial(choose_axis, smallest=True))


def _along(operand: jax.Array, axis: int, reverse: bool, scan: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Scans along an axis, from its end if `reverse`."""
    shape = operand.shape
    if reverse:
        operand = lax.rev(operand, (axis,))
    arranged = operand.reshape(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    result = scan(arranged).reshape(shape).astype(operand.dtype)
    return lax.rev(result, (axis,)) if reverse else result
