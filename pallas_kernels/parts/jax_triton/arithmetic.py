"""Element-wise functions of Triton kernels as fixed sequences of PTX instructions, with explicit rounding.

They are sequences of the kernels for Hopper, and have their contract (`pallas_kernels.contract.PTX_FUNCTIONS`).
"""

from typing import Final

import triton
import triton.language as tl
from triton.language.extra import libdevice

from pallas_kernels.parts.ptx import EXPONENTIAL

_EXPONENTIAL: Final = tl.constexpr(EXPONENTIAL)


@triton.jit
def exponential(x):
    """Returns exp(x) of a float32 tile, with an error of about 2**-22; results below 2**-126 are 0."""
    return tl.inline_asm_elementwise(_EXPONENTIAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def logarithm(x):
    """Returns the natural logarithm of float32, as CUDA's libdevice computes it."""
    return libdevice.log(x)
