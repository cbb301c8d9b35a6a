"""Instructions of Triton kernels whose rounding no compiler may change."""

import math
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt

LOG2E: Final = np.float32(math.log2(math.e))
LN2: Final = np.float32(math.log(2))


def product(a: jax.Array, b: jax.Array | np.float32, interpret: bool) -> jax.Array:
    """Returns the float32 product, rounded by itself: it is never part of a fused multiply-add."""
    a, b = jnp.broadcast_arrays(a, b)
    return a * b if interpret else _apply("mul.rn.f32 $0, $1, $2;", a, b)


def power_of_two(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns 2**x in float32, with a relative error of 2**-22 or so; results below 2**-126 are 0."""
    return jnp.exp2(x) if interpret else _apply("ex2.approx.ftz.f32 $0, $1;", x)


def quotient(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    """Returns the float32 quotient, rounded to nearest."""
    a, b = jnp.broadcast_arrays(a, b)
    return a / b if interpret else _apply("div.rn.f32 $0, $1, $2;", a, b)


def log2(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns the binary logarithm in float32, to 2**-22 or so: relative outside of (0.5, 2), absolute within."""
    return jnp.log2(x) if interpret else _apply("lg2.approx.ftz.f32 $0, $1;", x)


def fused(a: jax.Array, b: jax.Array | np.float32, c: jax.Array | np.float32, interpret: bool) -> jax.Array:
    """Returns a * b + c in float32, rounded once (twice on a CPU)."""
    a, b, c = jnp.broadcast_arrays(a, b, c)
    return a * b + c if interpret else _apply("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def _apply(instruction: str, *args: jax.Array) -> jax.Array:
    result: jax.Array
    (result,) = plt.elementwise_inline_asm(
        instruction,
        args=args,
        constraints=",".join(["=f", *["f"] * len(args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)],
    )
    return result
