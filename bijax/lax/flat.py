"""Element-wise primitives on whole vectors."""

import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.core.contracts import run
from pallas_kernels.contract import XLA_FUNCTIONS
from pallas_kernels.elementwise import portable
from pallas_kernels.parts.xla.tiles import isolate

Function = Callable[..., jax.Array]

_SHORT: Final = 2**12
"""Maximum number of elements that are brought into vectors by the kernel that computes them, and out of vectors by the
kernel that uses them."""


def on_vectors(primitive: Any, *operands: jax.Array, **parameters: Any) -> jax.Array:
    """Applies an element-wise primitive so that every element is computed by the same vector instructions.

    Args:
        primitive: The primitive; it has one result.
        *operands: Its operands, of one shape or of shapes that broadcast to it.
        **parameters: Its parameters.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    operands = tuple(jnp.broadcast_to(x, shape) for x in operands)
    # Two of XLA:CPU's code generators round inside a 16-bit function, at different points.
    dtype = jnp.result_type(*(x.dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating)))
    # The exponent of a power may be an integer, and stays an integer.
    wide = tuple(_widened(x) for x in operands)
    if primitive.name in _COMPOSED:
        return isolate(_COMPOSED[primitive.name](*isolate(*wide)))[0].astype(dtype)
    # The vectors have barriers of their own. The others keep long loops from computing indices of two shapes.
    is_long = math.prod(shape) > _SHORT
    result = _each(lambda *vectors: primitive.bind(*vectors, **parameters), *(isolate(*wide) if is_long else wide))
    return (isolate(result)[0] if is_long or dtype != result.dtype else result).astype(dtype)


def _widened(x: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float else x


def _each(function: Function, *arrays: jax.Array) -> jax.Array:
    def program(*vectors: jax.Array) -> tuple[jax.Array]:
        return (function(*vectors),)

    return run(portable.elementwise, *arrays, program=program, functions=XLA_FUNCTIONS)[0]


def _over(x: jax.Array, constant: float) -> jax.Array:
    """Divides by a constant that XLA cannot see."""
    return x / isolate(jnp.full(x.shape, constant, x.dtype))[0]


def _arctan(x: jax.Array) -> jax.Array:
    return _each(lax.atan2, x, isolate(jnp.ones_like(x))[0])


def _tan(x: jax.Array) -> jax.Array:
    return _each(lax.sin, x) / _each(lax.cos, x)


def _log2(x: jax.Array) -> jax.Array:
    return _over(_each(lax.log, x), float(np.log(2)))


def _cbrt(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    root = _each(lax.exp, _over(_each(lax.log, size), 3))
    (square,) = isolate(root * root)
    root = root - _over(root - size / square, 3)  # a step of Newton's method
    # A comparison with zero may see a subnormal number, whose logarithm is that of zero.
    least = float(np.finfo(x.dtype).tiny)
    ordinary = (size >= least) & (size < jnp.inf)
    return jnp.where(ordinary, lax.sign(x) * root, jnp.where(size < least, 0 * x, x))


# XLA:CPU computes these differently when they stand alone and when it fuses them or calls them from a loop.
_COMPOSED: Final[dict[str, Function]] = {"atan": _arctan, "cbrt": _cbrt, "log2": _log2, "tan": _tan}
