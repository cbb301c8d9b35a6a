"""Cumulative reductions, with the operands and parameters of JAX's own primitives."""

import math
from typing import Any

import jax
from jax import lax

from bijax.core.contracts import run
from pallas_kernels.contract import XLA_FUNCTIONS, ScanContract
from pallas_kernels.cumulative.portable import Scan, scan_axis


def cumsum(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Adds up every prefix along an axis, in float32 (float64 for float64), rounded once.

    Args:
        operand: Array of any shape, float32, bfloat16, float16 or float64.
        axis: The axis, counted from the front.
        reverse: Whether to add up suffixes, from the end, instead.

    Returns:
        An array of the shape and dtype of `operand`.

    Raises:
        UnsupportedError: If the dtype is not one of the four.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> cumsum(jax.numpy.ones((2, 3)), axis=1, reverse=True)[0].tolist()
        [3.0, 2.0, 1.0]
    """
    return _along(operand, axis, reverse, "sum")


def cumprod(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Multiplies every prefix along an axis; see `cumsum`.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> cumprod(jax.numpy.full(3, 2.0), axis=0, reverse=False).tolist()
        [2.0, 4.0, 8.0]
    """
    return _along(operand, axis, reverse, "prod")


def cumlogsumexp(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Takes the logarithm of the sum of exponentials of every prefix along an axis; see `cumsum`.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> [round(v, 3) for v in cumlogsumexp(jax.numpy.zeros(3), axis=0, reverse=False).tolist()]
        [0.0, 0.693, 1.099]
    """
    return _along(operand, axis, reverse, "logsumexp")


def _along(operand: jax.Array, axis: int, reverse: bool, scan: Scan) -> jax.Array:
    """Scans along an axis, from its end if `reverse`."""
    shape = operand.shape
    if reverse:
        operand = lax.rev(operand, (axis,))
    arranged = operand.reshape(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    functions: dict[str, Any] = {"functions": XLA_FUNCTIONS} if scan == "logsumexp" else {}
    scanned = run(scan_axis, arranged, scan=scan, contract=ScanContract(), **functions)
    result = scanned.reshape(shape).astype(operand.dtype)
    return lax.rev(result, (axis,)) if reverse else result
