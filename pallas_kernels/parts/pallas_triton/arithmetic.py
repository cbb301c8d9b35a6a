"""Arithmetic of Triton kernels with rounding that no compiler may change."""

import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.parts.philox import multiply

LOG2E: Final = np.float32(math.log2(math.e))
LN2: Final = np.float32(math.log(2))


def product(a: jax.Array, b: jax.Array | np.float32, interpret: bool) -> jax.Array:
    """Returns the rounded float32 product, never part of a fused multiply-add."""
    a, b = jnp.broadcast_arrays(a, b)
    return a * b if interpret else _apply("mul.rn.f32 $0, $1, $2;", a, b)


def power_of_two(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns 2**x in float32, with a relative error of about 2**-22; results below 2**-126 are 0."""
    return jnp.exp2(x) if interpret else _apply("ex2.approx.ftz.f32 $0, $1;", x)


def quotient(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    """Returns the float32 quotient, rounded to nearest."""
    a, b = jnp.broadcast_arrays(a, b)
    return a / b if interpret else _apply("div.rn.f32 $0, $1, $2;", a, b)


def log2(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns the base-2 logarithm in float32, with an error of about 2**-22: absolute in (0.5, 2), else relative."""
    return jnp.log2(x) if interpret else _apply("lg2.approx.ftz.f32 $0, $1;", x)


def fused(a: jax.Array, b: jax.Array | np.float32, c: jax.Array | np.float32, interpret: bool) -> jax.Array:
    """Returns a * b + c in float32, rounded once (twice on a CPU)."""
    a, b, c = jnp.broadcast_arrays(a, b, c)
    return a * b + c if interpret else _apply("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def larger(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    """Returns the float32 maximum, propagating nan, which `jnp.maximum` does not in Triton."""
    return jnp.maximum(a, b) if interpret else _apply("max.NaN.f32 $0, $1, $2;", a, b)


def halves(interpret: bool) -> Callable[[jax.Array, np.uint32], tuple[jax.Array, jax.Array]]:
    """Returns a function that multiplies uint32 and returns the upper and lower halves of the products."""
    return multiply if interpret else _halves


def _halves(x: jax.Array, factor: np.uint32) -> tuple[jax.Array, jax.Array]:
    product = _one("mul.wide.u32 $0, $1, $2;", "=l,r,r", np.int64, x, jnp.full_like(x, factor))
    # Triton has no unsigned types, and Pallas supports only one result.
    high = _one("{ .reg .b32 low; mov.b64 {low, $0}, $1; }", "=r,l", np.int32, product)
    low = _one("{ .reg .b32 high; mov.b64 {$0, high}, $1; }", "=r,l", np.int32, product)
    return lax.bitcast_convert_type(high, jnp.uint32), lax.bitcast_convert_type(low, jnp.uint32)


def _apply(instruction: str, *args: jax.Array) -> jax.Array:
    return _one(instruction, ",".join(["=f", *["f"] * len(args)]), args[0].dtype, *args)


def _one(instruction: str, constraints: str, dtype: Any, *args: jax.Array) -> jax.Array:
    result: jax.Array
    (result,) = plt.elementwise_inline_asm(
        instruction,
        args=args,
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return result
