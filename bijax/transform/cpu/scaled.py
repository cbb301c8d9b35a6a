"""Divisions by constant powers of two, computed as products with the reciprocal, which are as exact.

XLA counts the fence operations of a division, and runs a program of more than 1000 operations on another thread; the
mean of a matrix and its transpose, in `jax.numpy.linalg.eigh` and `cholesky`, is such a division.
"""

import math
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Literal

_LARGEST_EXPONENT: Final = 64
"""Up to this exponent, neither the divisor nor its reciprocal is near a subnormal number."""


def with_product(eqn: Any) -> Any:
    """Returns a division by a constant power of two as a product; other equations unchanged."""
    if eqn.primitive is not jax.lax.div_p or not isinstance(eqn.invars[1], Literal):
        return eqn
    aval: Any = eqn.invars[1].aval
    divisor = eqn.invars[1].val
    if aval.dtype not in (np.float32, np.float64) or np.ndim(divisor):
        return eqn
    fraction, exponent = math.frexp(divisor)
    if abs(fraction) != 0.5 or abs(exponent) > _LARGEST_EXPONENT:
        return eqn
    factor = Literal(aval.dtype.type(1 / divisor), aval)
    return eqn.replace(primitive=jax.lax.mul_p, invars=[eqn.invars[0], factor], params={})
