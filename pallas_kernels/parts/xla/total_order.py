"""Floating-point numbers as integers of the same order, whose maxima and minima are exact in any order.

A floating-point maximum does not specify which zero or nan it returns, and XLA's choice depends on the shape. The
integers here are totally ordered: -0 sorts before +0, and all nans map to a single value at the winning end.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.errors import UnsupportedError

# Other 8-bit floats have no sign, or encode nan as -0.
_SIGNED: Final = {
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"), jnp.int8),
    **dict.fromkeys(("bfloat16", "float16"), jnp.int16),
    "float32": jnp.int32,
    "float64": jnp.int64,
}


def to_ordered(x: jax.Array, *, nan_first: bool = False) -> jax.Array:
    """Returns signed integers of the same width as the elements of `x` that sort in the same order.

    Args:
        x: Array of a floating dtype of 2, 4 or 8 bytes, float8_e3m4, float8_e4m3, float8_e4m3fn or float8_e5m2.
        nan_first: Whether nans sort before all numbers (and win a minimum) or after them (and win a maximum).

    Raises:
        UnsupportedError: If the dtype is not one of these.

    Example:
        >>> to_ordered(jnp.array([-0.0, 0.0, 1.0])).tolist()
        [-1, 0, 1065353216]
    """
    bits = _bits(x)
    # As integers: XLA:CPU compares 16-bit floats as float32 numbers, and a loop with such a comparison may flush
    # subnormal numbers that it only moves.
    magnitude = bits & lax.full_like(bits, (1 << (8 * bits.dtype.itemsize - 1)) - 1)
    is_nan = magnitude > lax.full_like(bits, ordered_infinity(x.dtype, negative=False))
    return lax.select(is_nan, lax.full_like(bits, ordered_nan(x.dtype, nan_first=nan_first)), _flip(bits))


def from_ordered(ordered: jax.Array, dtype: np.dtype, *, nan_first: bool = False) -> jax.Array:
    """Inverts `to_ordered`; every nan becomes the positive quiet nan."""
    is_nan = ordered == lax.full_like(ordered, ordered_nan(dtype, nan_first=nan_first))
    nan = int(np.asarray(np.nan, dtype).view(_SIGNED[dtype.name]))
    chosen = lax.select(is_nan, lax.full_like(ordered, nan), _flip(ordered))
    return lax.bitcast_convert_type(chosen, dtype)


def choose_of_two(x: jax.Array, y: jax.Array, *, smallest: bool) -> jax.Array:
    """Returns the larger or smaller of two arrays of the same shape and dtype, elementwise; nan if either is nan.

    Example:
        >>> choose_of_two(jnp.array([-0.0, 1.0]), jnp.array([0.0, jnp.nan]), smallest=False).tolist()
        [0.0, nan]
    """
    bits_x, bits_y = _bits(x), _bits(y)
    width = 8 * x.dtype.itemsize
    # Integer wrap-around maps the nans of the losing sign to the winning end.
    turn = ordered_infinity(x.dtype, negative=False) + 1
    turn = (-turn if smallest else turn) + (1 << (width - 1))
    turn = (turn + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
    ordered_x, ordered_y = (_flip(bits) + lax.full_like(bits, turn) for bits in (bits_x, bits_y))
    # Select on integer comparisons: XLA would rewrite a select on a floating-point comparison as a maximum.
    chosen = lax.select(ordered_x < ordered_y if smallest else ordered_x > ordered_y, bits_x, bits_y)
    return lax.bitcast_convert_type(chosen, x.dtype)


def has_order(dtype: np.dtype) -> bool:
    """Returns whether numbers of a dtype can be ordered as integers.

    Example:
        >>> has_order(jnp.dtype("bfloat16")), has_order(jnp.dtype("float8_e4m3fnuz"))
        (True, False)
    """
    return dtype.name in _SIGNED


def has_infinity(dtype: np.dtype) -> bool:
    """Returns whether a floating dtype has infinities.

    Example:
        >>> has_infinity(np.dtype("float32")), has_infinity(jnp.dtype("float8_e4m3fn"))
        (True, False)
    """
    return bool(np.isinf(np.asarray(jnp.inf, dtype)))


def largest(dtype: np.dtype) -> float:
    """Returns infinity, or the largest number of a dtype without infinities."""
    if has_infinity(dtype):
        return float("inf")
    limits: Any = jnp.finfo
    return float(limits(dtype).max)


def ordered_infinity(dtype: np.dtype, *, negative: bool) -> int:
    """Returns the integer of an infinity, or of the largest or smallest number of a dtype without infinities.

    Example:
        >>> ordered_infinity(np.dtype("float32"), negative=False) == 0x7F800000
        True
    """
    bits = int(np.asarray(largest(dtype), dtype).view(f"i{dtype.itemsize}"))
    return -1 - bits if negative else bits


def ordered_nan(dtype: np.dtype, *, nan_first: bool) -> int:
    """Returns the integer of nan, which sorts after +inf or before -inf."""
    bits = int(np.asarray(jnp.nan, dtype).view(f"i{dtype.itemsize}"))
    return -1 - bits if nan_first else bits


def _bits(x: jax.Array) -> jax.Array:
    if not has_order(x.dtype):
        raise UnsupportedError(
            f"maximum or minimum: a batch-invariant order is defined for {', '.join(_SIGNED)}, got {x.dtype.name};"
            " convert the operand to a wider dtype."
        )
    return lax.bitcast_convert_type(x, _SIGNED[x.dtype.name])


def _flip(bits: jax.Array) -> jax.Array:
    """Converts between sign-magnitude and two's complement order."""
    width = 8 * bits.dtype.itemsize
    magnitude = lax.full_like(bits, (1 << (width - 1)) - 1)
    return bits ^ (lax.shift_right_arithmetic(bits, lax.full_like(bits, width - 1)) & magnitude)
