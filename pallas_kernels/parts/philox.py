"""Counter-based random words."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

type Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

# `bijax.invariant` leaves primitives with this prefix unchanged.
_upper_p: Final = Primitive("bijax_upper_half")

_ROUNDS: Final = 7
_FACTORS: Final = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_STEPS: Final = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


def multiply(x: jax.Array, factor: np.uint32) -> tuple[jax.Array, jax.Array]:
    """Returns the upper and lower 32 bits of uint32 products."""
    return _upper_p.bind(x, factor=int(factor)), x * factor


def philox(
    key: tuple[jax.Array, jax.Array],
    counter: Words,
) -> Words:
    """Returns the four words of Philox-4x32 with 7 rounds for a key and a counter of broadcastable uint32 arrays.

    With 7 or more rounds it passes all tests of BigCrush.

    Args:
        key: Two words.
        counter: Four words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).
    """
    k, m = key
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_c, low_c) = multiply(a, _FACTORS[0]), multiply(c, _FACTORS[1])
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = k + _STEPS[0], m + _STEPS[1]
    return a, b, c, d


def _upper(x: jax.Array, *, factor: int) -> jax.Array:
    return lax.mulhi(x, jnp.full_like(x, factor))


def _upper_by_halves(x: jax.Array, *, factor: int) -> jax.Array:
    half, low = np.uint32(16), np.uint32(0xFFFF)
    x_high, x_low = x >> half, x & low
    f_high, f_low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    middle = x_high * f_low + ((x_low * f_low) >> half)
    rest = x_low * f_high + (middle & low)
    return x_high * f_high + (middle >> half) + (rest >> half)


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, factor: int) -> Sequence[Any]:
    # XLA cannot read `mulhi` in a program for several devices: "failed to legalize operation 'mhlo.unknown'".
    on_one_device = getattr(ctx.module_context.axis_context, "num_devices", 0) in (None, 1)
    lower = mlir.lower_fun(_upper if on_one_device else _upper_by_halves, multiple_results=False)
    return lower(ctx, x, factor=factor)


_upper_p.def_impl(jax.jit(_upper, static_argnames="factor"))
_upper_p.def_abstract_eval(lambda x, factor: x)
batching.defvectorized(_upper_p)
mlir.register_lowering(_upper_p, _lower)
