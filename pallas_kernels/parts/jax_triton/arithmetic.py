"""Element-wise functions of Triton kernels as fixed sequences of PTX instructions, with explicit rounding.

They are sequences of the kernels for Hopper, and have their contract (`pallas_kernels.contract.PTX_FUNCTIONS`).
"""

import math
import struct
from typing import Final

import triton
import triton.language as tl
from triton.language.extra import libdevice


def hexadecimal(number: float) -> str:
    """Returns a float32 constant as PTX writes it.

    Example:
        >>> hexadecimal(1.0)
        '0f3F800000'
    """
    return f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


def _rounded(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


_LOG2E: Final = _rounded(math.log2(math.e))
_LEAST: Final = -192.0  # its exponential is 0
# The product with log2(e) is rounded; its error, by fused multiply-adds, corrects the result. A maximum that propagates
# nan avoids -inf in the difference.
_EXPONENTIAL: Final = tl.constexpr(
    "{ .reg .f32 x, t, r, e;"
    f" max.NaN.f32 x, $1, {hexadecimal(_LEAST)};"
    f" mul.rn.f32 t, x, {hexadecimal(_LOG2E)};"
    " neg.f32 r, t;"
    f" fma.rn.f32 r, x, {hexadecimal(_LOG2E)}, r;"
    f" fma.rn.f32 r, x, {hexadecimal(math.log2(math.e) - _LOG2E)}, r;"
    f" mul.rn.f32 r, r, {hexadecimal(math.log(2))};"
    " ex2.approx.ftz.f32 e, t;"
    " fma.rn.f32 $0, e, r, e; }"
)


@triton.jit
def exponential(x):
    """Returns exp(x) of a float32 tile, with an error of about 2**-22; results below 2**-126 are 0."""
    return tl.inline_asm_elementwise(_EXPONENTIAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def logarithm(x):
    """Returns the natural logarithm of float32, as CUDA's libdevice computes it."""
    return libdevice.log(x)
