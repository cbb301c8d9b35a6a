"""Maxima and minima of two numbers and of prefixes, with the operands and parameters of JAX's own primitives.

XLA:CPU flushes subnormal numbers to zero in some implementations of a floating maximum and not in others: in whole
vectors of bfloat16 but not in the remainder, or where it finds that both operands are one value. As integers in a
total order they have a unique maximum.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.xla.tiles import in_one_loop, isolate
from pallas_kernels.parts.xla.total_order import choose_of_two, from_ordered, to_ordered


def maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the larger of two numbers, element by element.

    Args:
        x: Array of a floating dtype of 2, 4 or 8 bytes, float8_e3m4, float8_e4m3, float8_e4m3fn or float8_e5m2.
        y: Array of that dtype and of a shape that broadcasts with that of `x`.

    Returns:
        One of the two numbers, +0 rather than -0; the positive quiet nan where one of them is nan.

    Raises:
        UnsupportedError: If the dtype is not one of these.

    Guarantee: row-invariant. (Rows are elements.)

    Example:
        >>> maximum(jnp.array([-0.0, 1.0]), jnp.array([0.0, -1.0])).tolist()
        [0.0, 1.0]
    """
    return _of_two(x, y, smallest=False)


def minimum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the smaller of two numbers, -0 rather than +0; see `maximum`.

    Guarantee: row-invariant. (Rows are elements.)

    Example:
        >>> minimum(jnp.array([-0.0, 1.0]), jnp.array([0.0, -1.0])).tolist()
        [-0.0, -1.0]
    """
    return _of_two(x, y, smallest=True)


def clamp(low: jax.Array, x: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the smaller of `high` and of the larger of `low` and `x`; see `maximum`.

    Guarantee: row-invariant. (Rows are elements.)

    Example:
        >>> clamp(jnp.array(-1.0), jnp.array([-2.0, 0.5, 2.0]), jnp.array(1.0)).tolist()
        [-1.0, 0.5, 1.0]
    """
    return minimum(maximum(low, x), high)


def cummax(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Returns the largest element of every prefix along an axis.

    Args:
        operand: Array of any shape, of a dtype of `maximum`.
        axis: The axis, counted from the front.
        reverse: Whether to look at suffixes instead of prefixes.

    Returns:
        An array of the shape and dtype of `operand`: +0 rather than -0, and nan from the first one on.

    Raises:
        UnsupportedError: If no order of the dtype is defined.

    Guarantee: row-invariant; an element depends on its prefix alone.

    Example:
        >>> cummax(jnp.array([1.0, 3.0, 2.0]), axis=0, reverse=False).tolist()
        [1.0, 3.0, 3.0]
    """
    return _of_prefixes(lax.cummax, operand, axis, reverse, smallest=False)


def cummin(operand: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """Returns the smallest element of every prefix along an axis; see `cummax`.

    Guarantee: row-invariant; an element depends on its prefix alone.

    Example:
        >>> cummin(jnp.array([3.0, 1.0, 2.0]), axis=0, reverse=False).tolist()
        [3.0, 1.0, 1.0]
    """
    return _of_prefixes(lax.cummin, operand, axis, reverse, smallest=True)


def _of_two(x: jax.Array, y: jax.Array, *, smallest: bool) -> jax.Array:
    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return choose_of_two(*jnp.broadcast_arrays(x, y), smallest=smallest)

    shape = jnp.broadcast_shapes(x.shape, y.shape)
    return in_one_loop(choose, *(jnp.broadcast_to(operand, shape) if operand.ndim else operand for operand in (x, y)))


def _of_prefixes(
    scan: Callable[..., jax.Array], operand: jax.Array, axis: int, reverse: bool, *, smallest: bool
) -> jax.Array:
    # With barriers: XLA:CPU would recompute the windows of prefixes for each element of the fused consumer.
    ordered = in_one_loop(functools.partial(to_ordered, nan_first=smallest), operand)
    (ordered,) = isolate(scan(*isolate(ordered), axis=axis, reverse=reverse))
    return from_ordered(ordered, operand.dtype, nan_first=smallest)
