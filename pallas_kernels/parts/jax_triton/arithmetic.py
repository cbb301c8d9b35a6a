"""Element-wise functions of Triton kernels as fixed sequences of PTX instructions, with explicit rounding.

They are sequences of the kernels for Hopper, and have their contract (`pallas_kernels.contract.PTX_FUNCTIONS`), except
for `xla_silu`.
"""

from typing import Final

import triton
import triton.language as tl
from triton.language.extra import libdevice

from pallas_kernels.parts.ptx import (
    EXPONENTIAL,
    FLOAT_QUOTIENT,
    INTEGER_QUOTIENT,
    LARGE_POWER,
    PLAIN_EXPONENTIAL,
    SILU,
    SMALL_SCALE,
    XLA_SILU,
)

_EXPONENTIAL: Final = tl.constexpr(EXPONENTIAL)
_PLAIN_EXPONENTIAL: Final = tl.constexpr(PLAIN_EXPONENTIAL)
_SILU: Final = tl.constexpr(SILU)
_XLA_SILU: Final = tl.constexpr(XLA_SILU)
_HALVES: Final = tl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000; }")
_INTEGER_QUOTIENT: Final = tl.constexpr(INTEGER_QUOTIENT)
_FLOAT_QUOTIENT: Final = tl.constexpr(FLOAT_QUOTIENT)
_SMALL_SCALE: Final = tl.constexpr(float(SMALL_SCALE))
_LARGE_POWER: Final = tl.constexpr(float(LARGE_POWER))


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """Returns exp(x) of a float32 tile; results below 2**-126 are 0.

    `EXACT` is for arrays of float32: the error is about 2**-22, and x must be at most 0 (or nan).
    """
    if EXACT:
        y = tl.inline_asm_elementwise(_EXPONENTIAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.inline_asm_elementwise(_PLAIN_EXPONENTIAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def logarithm(x):
    """Returns the natural logarithm of float32, as CUDA's libdevice computes it."""
    return libdevice.log(x)


@triton.jit
def silu(x):
    """Returns x / (1 + exp(-x)) of float32."""
    return tl.inline_asm_elementwise(_SILU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def xla_silu(x):
    """Returns x / (1 + exp(-x)) of float32 with the bits of XLA."""
    return tl.inline_asm_elementwise(_XLA_SILU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def in_float32(x):
    """Returns numbers in float32, two bfloat16 numbers by two instructions; Triton's own conversion takes three."""
    if x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(_HALVES, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def narrow(h, scale, good, INTEGER: tl.constexpr):
    """Returns h / scale rounded to int8, or to the bits of float8_e4m3fn: first to float32, then to 8 bits.

    Args:
        h: (R, L) float32.
        scale: (R, 1) float32, at least 2**-126.
        good: (R, 1) bool; otherwise the result is 0.
        INTEGER: Whether to round to int8.
    """
    power = tl.where(scale < _SMALL_SCALE, _LARGE_POWER, 1.0)
    divisor = tl.where(good, scale * power, 1.0)
    inverse = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)
    if INTEGER:
        bits = _quotient_bits(_INTEGER_QUOTIENT, h, power, divisor, inverse)
    else:
        bits = _e4m3(_quotient_bits(_FLOAT_QUOTIENT, h, power, divisor, inverse))
    return tl.where(good, bits, 0).to(tl.int8)


@triton.jit
def _quotient_bits(ptx: tl.constexpr, h, power, divisor, inverse):
    return tl.inline_asm_elementwise(
        ptx, "=r,f,f,f,f", [h, power, divisor, inverse], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _e4m3(bits):
    """Rounds float32 to float8_e4m3fn, to nearest even; both as bits, of which the lowest byte is the result."""
    magnitude = bits & 0x7FFFFFFF
    normal = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    # A number below 2**-6 becomes a multiple of 2**-9: so does the last bit of its sum with 1.5 * 2**14.
    small = (magnitude.to(tl.float32, bitcast=True) + 24576.0).to(tl.int32, bitcast=True)
    rounded = tl.where(magnitude < 0x3C800000, small & 0xFF, (normal >> 20) - 960)
    return rounded | ((bits >> 24) & 0x80)


@triton.jit
def log2_approximate(x):
    """Returns the logarithm to base 2 in float32; its error is 2**-22, relative outside (0.5, 2), absolute inside."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def product(a, b):
    """Returns the rounded float32 product, never part of a fused multiply-add."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def fused(a, b, c):
    """Returns a * b + c in float32, rounded once."""
    fma: tl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(fma, "=f,f,f,f", [a, b, c], tl.float32, is_pure=True, pack=1)


@triton.jit
def power_of_two(x):
    """Returns 2**x in float32, with a relative error of about 2**-22; results below 2**-126 are 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def half_sums(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns sums (ROWS, COLUMNS) of float32 (ROWS, WIDTH): its left half is added to its right half until they fit.

    Each step of Triton's sum adds two elements, so that no layout of the registers changes the order.
    """
    if WIDTH > COLUMNS:
        halves = tl.sum(tl.reshape(x, (ROWS, 2, WIDTH // 2)), 1)
        return half_sums(halves, ROWS, WIDTH // 2, COLUMNS)
    else:
        return x
