"""Subnormal numbers, zeros, infinities and nans, and the programs that meet them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.testing import bits

DTYPES = ("float32", "bfloat16", "float16", "float64")

_MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


def special_values(dtype: str) -> np.ndarray:
    """Returns numbers of either sign: zeros, subnormal ones, the smallest and largest, infinities, several nans."""
    resolved, mantissa = jnp.dtype(dtype), _MANTISSA_BITS[dtype]
    ordinary = [int(bits(np.asarray(v, resolved))[()]) for v in (0.5, 1, 1.5, 3)]
    infinity, quiet, smallest = int(bits(np.asarray(np.inf, resolved))[()]), 1 << (mantissa - 1), 1 << mantissa
    nans = [infinity | quiet, infinity | quiet | 5]
    patterns = [0, 1, 3, smallest - 1, quiet, smallest, smallest + 1, infinity - 1, infinity, *nans, *ordinary]
    sign = 1 << (8 * resolved.itemsize - 1)
    return np.array([p | s for p in patterns for s in (0, sign)], f"u{resolved.itemsize}").view(resolved)


def bits_without_nans(x: jax.Array) -> np.ndarray:
    """Returns the bits of an array, in which every nan is the same one."""
    array = np.asarray(x)
    if array.dtype.kind in "biu":
        return array
    return np.where(np.isnan(array), bits(np.asarray(np.nan, array.dtype)), bits(array))


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16 if x.dtype != jnp.bfloat16 else jnp.float16)


_BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub".split()
_UNARY = (
    "abs asinh atan cbrt ceil cos cosh erf erf_inv erfc exp exp2 expm1 floor is_finite log log1p logistic neg round"
    " rsqrt sign sin sinh sqrt square tan tanh"
).split()

Function = Callable[[jax.Array, jax.Array], jax.Array]


def _first(function: Callable[[jax.Array], jax.Array]) -> Function:
    return lambda x, y: function(x)


ELEMENTWISE: dict[str, Function] = {
    **{name: _first(getattr(lax, name)) for name in _UNARY},
    **{name: getattr(lax, name) for name in _BINARY},
    "clamp": lambda x, y: lax.clamp(lax.min(x, y), lax.neg(x), lax.max(x, y)),
    "clip": lambda x, y: jnp.clip(x, -1, 1),
    "convert": lambda x, y: x.astype(jnp.float64),
    "convert and back": lambda x, y: _narrow(x).astype(x.dtype),
    "copysign": lambda x, y: jnp.copysign(x, jnp.where(y == y, y, 0)),
    "hypot": jnp.hypot,
    "integer_pow": lambda x, y: lax.integer_pow(x, 3),
    "narrow": lambda x, y: _narrow(x),
    "product and sum": lambda x, y: x * y + x,
    "reduce_precision": lambda x, y: lax.reduce_precision(x, 5, 3),
    "relu": lambda x, y: jax.nn.relu(x),
    "select": lambda x, y: jnp.where(x >= y, x, -y),
    "signbit": lambda x, y: jnp.signbit(jnp.where(x == x, x, 0)),
    "total order": lambda x, y: lax.sort(jnp.stack([x, y]), dimension=0)[0],
    "widened maximum": lambda x, y: lax.max(x.astype(jnp.float64), y.astype(jnp.float64)).astype(x.dtype),
}
"""Programs of two arrays of one shape, in which each element depends on the same element of the two alone."""


def _placed(x: jax.Array, how: str) -> jax.Array:
    return getattr(x.at[jnp.arange(x.shape[0]) // 2], how)(x)


ROWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "cummax": lambda x: lax.cummax(x, 0),
    "cummin reversed": lambda x: lax.cummin(x, 0, reverse=True),
    "cumsum": lambda x: lax.cumsum(x, 0),
    "loop of maxima": lambda x: lax.scan(lambda c, v: (lax.max(c, v), lax.min(c, v)), x[0], x)[1],
    "maximum of neighbours": lambda x: lax.max(x, jnp.roll(x, 1)),
    "maximum of the mirror image": lambda x: lax.max(x, lax.rev(x, (0,))),
    "minimum of the mirror image": lambda x: lax.min(lax.rev(x, (0,)), x),
    "outer maximum": lambda x: lax.max(*jnp.broadcast_arrays(x[:, None], x[None])),
    "reduce_max": lambda x: x.max(),
    "reduce_min": lambda x: x.min(),
    "reduce_sum": lambda x: x.sum(),
    "scatter-add": lambda x: _placed(x, "add"),
    "scatter-max": lambda x: _placed(x, "max"),
    "scatter-min": lambda x: _placed(x, "min"),
    "segment_max": lambda x: jax.ops.segment_max(x, jnp.arange(x.shape[0]) // 2, num_segments=x.shape[0]),
    "set": lambda x: x.at[0].set(x[-1]),
    "softmax": jax.nn.softmax,
    "sort": lax.sort,
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "windows": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME"),
}
"""Programs of one row."""
