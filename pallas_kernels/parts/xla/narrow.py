"""Quantisation of float32 to 8 bits with a scale per row: exact maxima, and rounding that no compiler changes."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import QuantizeContract
from pallas_kernels.parts.xla.opaque import opaque_zero

SMALLEST_SCALE: Final = np.finfo(np.float32).tiny
"""2 ** -126, the smallest normal number: the scale of a row of zeros."""

_MAGNITUDE: Final = 0x7FFFFFFF
_E4M3_DROPPED: Final = 20  # bits of float32's fraction that float8_e4m3fn lacks
_E4M3_NORMAL: Final = np.float32(2.0**-6)
_E4M3_SUBNORMAL: Final = np.float32(1.5 * 2.0**14)  # a sum with it is rounded to multiples of 2**-9


def quantize_columns(h: jax.Array, contract: QuantizeContract) -> tuple[jax.Array, jax.Array]:
    """Quantises each row of h by its largest magnitude.

    Args:
        h: (M, C) float32; sums, or products that are not followed by a sum.
        contract: The format.

    Returns:
        (M, C) of the format, and the scales (M, 1) float32. No clipping is needed: the largest quotient equals the
        format's largest number up to the rounding of two divisions, and so rounds to it.
    """
    # The bits of non-negative numbers sort like the numbers, inf and nan last. An integer maximum is exact, however XLA
    # compiles the reduction.
    magnitude = lax.bitcast_convert_type(h, jnp.int32) & jnp.int32(_MAGNITUDE)
    largest = lax.bitcast_convert_type(jnp.max(magnitude, axis=1, keepdims=True, initial=0), jnp.float32)
    (largest,) = lax.optimization_barrier((largest,))
    scale = divide_by_hidden(largest, jnp.full(largest.shape, contract.largest, jnp.float32))
    scale = jnp.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    good = jnp.isfinite(scale)
    (divisor,) = lax.optimization_barrier((jnp.where(good, scale, jnp.float32(1)),))
    rounded = round_quotient(h, jnp.broadcast_to(divisor, h.shape), contract)
    y = jnp.where(good, rounded, jnp.zeros((), rounded.dtype))
    return y, jnp.where(good, scale, jnp.float32(jnp.nan))


def round_quotient(h: jax.Array, scale: jax.Array, contract: QuantizeContract) -> jax.Array:
    """Returns h / scale for float32 arrays of the same shape, rounded to float32 and then to the contract's format."""
    quotient = divide_by_hidden(h, scale)
    if contract.format == "int8":
        return jnp.round(quotient).astype(jnp.int8)
    return _to_e4m3(quotient)


def divide_by_hidden(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Divides float32 arrays of the same shape; XLA would rewrite division by a visible broadcast as a product."""
    return numerator / lax.select(jnp.broadcast_to(opaque_zero() == 0, denominator.shape), denominator, numerator)


def _to_e4m3(x: jax.Array) -> jax.Array:
    """Rounds to float8_e4m3fn, to nearest even; XLA may convert the result through float16, which is exact."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    half = jnp.uint32((1 << _E4M3_DROPPED - 1) - 1)
    bits = bits + half + (bits >> _E4M3_DROPPED & jnp.uint32(1))
    bits = bits & jnp.uint32(0xFFFFFFFF << _E4M3_DROPPED & 0xFFFFFFFF)
    normal = lax.bitcast_convert_type(bits, jnp.float32)
    (shifted,) = lax.optimization_barrier((jnp.abs(x) + _E4M3_SUBNORMAL,))
    small = lax.bitcast_convert_type(shifted - _E4M3_SUBNORMAL, jnp.uint32)
    # Zeros are unsigned, as after the quotient corrections on a GPU.
    sign = jnp.where(x == 0, jnp.uint32(0), lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x80000000))
    small = lax.bitcast_convert_type(small | sign, jnp.float32)
    return jnp.where(jnp.abs(x) < _E4M3_NORMAL, small, normal).astype(jnp.float8_e4m3fn)
