"""Element-wise functions as fixed sequences of PTX instructions, which every backend that emits them shares.

An instruction with an explicit rounding mode is never contracted with another one. $0 is the result of a sequence and
$1 its operand. `pallas_kernels.contract.PTX_FUNCTIONS` is their contract.
"""

import math
from typing import Any, Final

import numpy as np


def hexadecimal(number: float | np.floating[Any]) -> str:
    """Returns a float32 constant as PTX writes it.

    Example:
        >>> hexadecimal(1.0)
        '0f3F800000'
    """
    return f"0f{np.float32(number).view(np.uint32):08X}"


LOG2E: Final = np.float32(math.log2(math.e))
_LOG2E_REST: Final = np.float32(math.log2(math.e) - float(LOG2E))
_LN2: Final = np.float32(math.log(2))
_LEAST: Final = np.float32(-192.0)  # its exponential is 0

# The product with log2(e) is rounded; its error, by fused multiply-adds, corrects the result. A maximum that propagates
# nan avoids -inf in the difference.
EXPONENTIAL: Final = (
    "{ .reg .f32 x, t, r, e;"
    f" max.NaN.f32 x, $1, {hexadecimal(_LEAST)};"
    f" mul.rn.f32 t, x, {hexadecimal(LOG2E)};"
    " neg.f32 r, t;"
    f" fma.rn.f32 r, x, {hexadecimal(LOG2E)}, r;"
    f" fma.rn.f32 r, x, {hexadecimal(_LOG2E_REST)}, r;"
    f" mul.rn.f32 r, r, {hexadecimal(_LN2)};"
    " ex2.approx.ftz.f32 e, t;"
    " fma.rn.f32 $0, e, r, e; }"
)
"""exp(x) for x of at most 0 (or nan), with an error of about 2**-22; results below 2**-126 are 0."""

PLAIN_EXPONENTIAL: Final = f"{{ .reg .f32 t; mul.rn.f32 t, $1, {hexadecimal(LOG2E)}; ex2.approx.ftz.f32 $0, t; }}"
"""exp(x), with a relative error of |x| * 2**-24 more, for rows of 16 bits; results below 2**-126 are 0."""

SIGMOID_OF_T: Final = f"""
    ex2.approx.ftz.f32 t, t;
    add.rn.f32 t, t, {hexadecimal(1.0)};
    rcp.approx.ftz.f32 t, t;
    mul.rn.f32 $0, $1, t;
}}"""
"""The end of a sequence with a register t = v log2(e): z / (1 + exp(v)). The quotient is a product with the reciprocal,
which has an error of at most 1 ULP."""

SILU: Final = f"""{{
    .reg .f32 t;
    mul.rn.f32 t, $1, {hexadecimal(-math.log2(math.e))};{SIGMOID_OF_T}"""
"""z / (1 + exp(-z))."""


def xla_exponential(result: str) -> str:
    """Returns the instructions that XLA has for exp(x), and declarations of t, u, r and s.

    Args:
        result: The register of the result.
    """
    return f"{_xla_powers()}\n    mul.rn.f32 {result}, r, u;"


def _xla_powers(*, negated: bool = False) -> str:
    """Returns instructions for exp(x), or for exp(-x), as the product of r and u, which is a power of two."""
    sign = "B" if negated else "3"  # first digit of constants, with the sign and a part of the exponent
    return f"""
    .reg .f32 t, u, r;
    .reg .b32 s;
    fma.rn.f32 t, $1, 0f{sign}BBB989D, 0f3F000000;
    cvt.sat.f32.f32 t, t;
    fma.rm.f32 t, t, 0f437C0000, 0f4B400001;
    add.rn.f32 u, t, 0fCB40007F;
    neg.f32 u, u;
    fma.rn.f32 r, $1, 0f{sign}FB8AA3B, u;
    fma.rn.f32 r, $1, 0f{sign}2A57060, r;
    ex2.approx.ftz.f32 r, r;
    mov.b32 s, t;
    shl.b32 s, s, 23;
    mov.b32 u, s;"""


XLA_SILU: Final = (
    f"{{ {_xla_powers(negated=True)}\n    fma.rn.f32 r, r, u, 0f3F800000;"
    " mul.rn.f32 r, r, 0f3E800000; rcp.approx.ftz.f32 r, r; mul.rn.f32 r, r, 0f3E800000; mul.rn.f32 $0, $1, r; }"
)
"""z / (1 + exp(-z)) as XLA computes it on a GPU (`pallas_kernels.contract.XLA_FUNCTIONS`): the exponential of CUDA's
libdevice, an approximate reciprocal, and a product. The contract of programs without kernels of their own.

XLA has `rcp.approx.f32` of the sum itself, which takes four instructions more: it cares for small operands, and this
one is at least 1. That of a quarter of it is never subnormal. The exponential's product by a power of two is exact,
unless it is subnormal and the sum is 1, so a fused sum has the same bits. They are the same for all numbers."""

_QUOTIENT: Final = """
    mul.rn.f32 h, $1, $2;
    mul.rn.f32 q, h, $4;
    neg.f32 n, q;
    fma.rn.f32 e, n, $3, h;
    fma.rn.f32 q, e, $4, q;
    neg.f32 n, q;
    fma.rn.f32 e, n, $3, h;
    fma.rn.f32 q, e, $4, q;
"""
INTEGER_QUOTIENT: Final = f"{{ .reg .f32 h, q, n, e; {_QUOTIENT} add.rn.f32 q, q, 0f4B400000; mov.b32 $0, q; }}"
"""The bits of a quotient plus 1.5 * 2**23, which rounds it to an integer, to nearest even: their lowest byte is the
integer's. The quotient is that of $1 and a scale, rounded to float32 first: $2 is a power of two, $3 the scale times
it, and $4 the reciprocal of $3. The product with the reciprocal is corrected twice by its remainder (Markstein,
"Computation of elementary functions on the IBM RISC System/6000 processor", 1990). The power of two keeps the
remainders of a small scale from being subnormal."""

FLOAT_QUOTIENT: Final = f"{{ .reg .f32 h, q, n, e; {_QUOTIENT} mov.b32 $0, q; }}"
"""The bits of that quotient in float32."""

SMALL_SCALE: Final = np.float32(2.0**-60)
"""Scales below it are multiplied by `LARGE_POWER`."""

LARGE_POWER: Final = np.float32(2.0**64)
