"""Quantisation of rows to int8: what the operations that quantise share."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.ops.elementwise import elementwise

LARGEST: Final = 127
"""Largest magnitude of a quantised number; -128 is not used."""

SMALLEST_SCALE: Final = float(np.finfo(np.float32).tiny)
"""2 ** -126, the smallest normal number: what a row of zeros has for its scale."""

_MAGNITUDE: Final = 0x7FFFFFFF

# A product that XLA could see beside a sum or a division of the next step would be computed in another way.
_smooth: Any = elementwise(lambda x, s: x.astype(jnp.float32) * s.astype(jnp.float32))
_widen: Any = elementwise(lambda x: x.astype(jnp.float32))


def _scale_of(largest: jax.Array, divisor: jax.Array) -> jax.Array:
    scale = largest / divisor
    scale = jnp.where(scale < SMALLEST_SCALE, jnp.float32(SMALLEST_SCALE), scale)
    return jnp.where(jnp.isfinite(scale), scale, jnp.float32(jnp.nan))


def _rounded(h: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(scale), jnp.round(h / scale), jnp.float32(0)).astype(jnp.int8)


_scale: Any = elementwise(_scale_of)
_round: Any = elementwise(_rounded)


def quantize_rows(x: jax.Array, smooth_scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Quantises each row of x * smooth_scale by its largest magnitude.

    Args:
        x: (..., C) of a floating dtype.
        smooth_scale: An array that broadcasts with `x`, or None.

    Returns:
        (..., C) int8 and the scales (...) float32. No quotient needs to be cut to ±127: the largest one is 127 within
        the rounding of two divisions, and so rounds to it.
    """
    h = _widen(x) if smooth_scale is None else _smooth(x, smooth_scale)
    # The bits of numbers without their sign are in the order of the numbers, inf and nan last. The maximum of integers
    # is exact, whatever XLA makes of the reduction.
    magnitude = lax.bitcast_convert_type(h, jnp.int32) & jnp.int32(_MAGNITUDE)
    largest = lax.bitcast_convert_type(jnp.max(magnitude, axis=-1, keepdims=True, initial=jnp.int32(0)), jnp.float32)
    # An argument, not a constant: XLA would multiply by the reciprocal of a constant.
    scale = _scale(largest, jnp.float32(LARGEST))
    return _round(h, scale), scale[..., 0]
