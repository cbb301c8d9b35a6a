"""Arithmetic whose rounding no compiler may change, and the functions of a kernel."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def product(a, b):
    """Returns the rounded float32 product, never part of a fused multiply-add."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def product_and_sum(a, b, c):
    """Returns a * b + c in float32, rounded once."""
    return tl.fma(a, b, c)


@triton.jit
def quotient(a, b):
    """Returns the float32 quotient, rounded to nearest."""
    return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def power_of_two(x):
    """Returns 2**x in float32, with a relative error of about 2**-22; results below 2**-126 are 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent in float32."""
    return libdevice.tanh(x)


@triton.jit
def log2(x):
    """Returns the logarithm to base 2 in float32."""
    return libdevice.log2(x)


@triton.jit
def is_finite(x):
    """Returns whether numbers are neither nan nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def opaque_32(x):
    """Returns the 32-bit integers, of which Triton does not see what they were made from.

    For operands that were made from numbers of 8 bits, a mask for example, Triton adds the products of `tl.dot` by
    `mma.sync` in another order than for other operands: for each thread, as many elements as fit into 32 bits. It finds
    the loads by following operations without side effects, of which this is none.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=False, pack=1)


@triton.jit
def opaque_float(x):
    """Returns float32 numbers as `opaque_32` returns integers."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, is_pure=False, pack=1)


@triton.jit
def opaque_index(x):
    """Returns a 32-bit index, of which the compiler does not see what it was computed from.

    Pointers that are computed from a loop's index become one register pair each, which all are moved in each step.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def opaque_16(x):
    """Returns 16-bit floats as `opaque_32` returns integers."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)
