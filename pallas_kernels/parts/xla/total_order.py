"""Floating numbers as integers of the same order, on which maxima and minima are exact in any order.

The maximum of two floating numbers leaves open which zero and which nan comes out, and XLA answers by the shape. The
integers here are totally ordered: -0 stands before +0, and every nan is one and the same nan at the end that wins.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.errors import UnsupportedError

# Other floats of 8 bits have no sign, or a nan in the place of -0.
_SIGNED: Final = {
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"), jnp.int8),
    **dict.fromkeys(("bfloat16", "float16"), jnp.int16),
    "float32": jnp.int32,
    "float64": jnp.int64,
}


def to_ordered(x: jax.Array, *, nan_first: bool = False) -> jax.Array:
    """Returns signed integers, as wide as the elements of `x`, in the order of its elements.

    Args:
        x: Array of a floating dtype of 2, 4 or 8 bytes, float8_e3m4, float8_e4m3, float8_e4m3fn or float8_e5m2.
        nan_first: Whether nans stand before all numbers (they win a minimum) or behind them (they win a maximum).

    Raises:
        UnsupportedError: If the dtype is none of these.

    Example:
        >>> to_ordered(jnp.array([-0.0, 0.0, 1.0])).tolist()
        [-1, 0, 1065353216]
    """
    bits = _flip(_bits(x))
    return lax.select(x != x, lax.full_like(bits, ordered_nan(x.dtype, nan_first=nan_first)), bits)


def from_ordered(ordered: jax.Array, dtype: np.dtype, *, nan_first: bool = False) -> jax.Array:
    """Returns the numbers that `to_ordered` made these integers of; every nan comes back as the positive quiet one."""
    x = lax.bitcast_convert_type(_flip(ordered), dtype)
    is_nan = ordered == lax.full_like(ordered, ordered_nan(dtype, nan_first=nan_first))
    return lax.select(is_nan, lax.full_like(x, jnp.nan), x)


def choose_of_two(x: jax.Array, y: jax.Array, *, smallest: bool) -> jax.Array:
    """Returns the larger or the smaller of two numbers of one shape and dtype; a nan where one of them is nan.

    Example:
        >>> choose_of_two(jnp.array([-0.0, 1.0]), jnp.array([0.0, jnp.nan]), smallest=False).tolist()
        [0.0, nan]
    """
    bits_x, bits_y = _bits(x), _bits(y)
    width = 8 * x.dtype.itemsize
    # Sums of integers wrap round: those of the nans of the sign that stands at the losing end come out at the other.
    turn = ordered_infinity(x.dtype, negative=False) + 1
    turn = (-turn if smallest else turn) + (1 << (width - 1))
    turn = (turn + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
    ordered_x, ordered_y = (_flip(bits) + lax.full_like(bits, turn) for bits in (bits_x, bits_y))
    # Chosen as integers: a choice by a comparison of floating numbers would be a floating maximum again.
    chosen = lax.select(ordered_x < ordered_y if smallest else ordered_x > ordered_y, bits_x, bits_y)
    return lax.bitcast_convert_type(chosen, x.dtype)


def has_infinity(dtype: np.dtype) -> bool:
    """Returns whether a floating dtype has infinities.

    Example:
        >>> has_infinity(np.dtype("float32")), has_infinity(jnp.dtype("float8_e4m3fn"))
        (True, False)
    """
    return bool(np.isinf(np.asarray(jnp.inf, dtype)))


def largest(dtype: np.dtype) -> float:
    """Returns infinity, or the largest number of a dtype that has none."""
    if has_infinity(dtype):
        return float("inf")
    limits: Any = jnp.finfo
    return float(limits(dtype).max)


def ordered_infinity(dtype: np.dtype, *, negative: bool) -> int:
    """Returns the integer of an infinity, or of the largest or smallest number of a dtype that has none.

    Example:
        >>> ordered_infinity(np.dtype("float32"), negative=False) == 0x7F800000
        True
    """
    bits = int(np.asarray(largest(dtype), dtype).view(f"i{dtype.itemsize}"))
    return -1 - bits if negative else bits


def ordered_nan(dtype: np.dtype, *, nan_first: bool) -> int:
    """Returns the integer of nan, which stands behind +inf or before -inf."""
    bits = int(np.asarray(jnp.nan, dtype).view(f"i{dtype.itemsize}"))
    return -1 - bits if nan_first else bits


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype.name not in _SIGNED:
        raise UnsupportedError(
            f"maximum or minimum: a batch-invariant order is defined for {', '.join(_SIGNED)}, got {x.dtype.name};"
            " convert the operand to a wider dtype."
        )
    return lax.bitcast_convert_type(x, _SIGNED[x.dtype.name])


def _flip(bits: jax.Array) -> jax.Array:
    """Turns sign and magnitude into an order of signed integers, and back."""
    width = 8 * bits.dtype.itemsize
    magnitude = lax.full_like(bits, (1 << (width - 1)) - 1)
    return bits ^ (lax.shift_right_arithmetic(bits, lax.full_like(bits, width - 1)) & magnitude)
