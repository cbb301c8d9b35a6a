"""Activations in Triton kernels as fixed sequences of PTX instructions, with explicit rounding.

They are the sequences of the kernels for Hopper, and have their contract (`pallas_kernels.contract.PTX_FUNCTIONS`).
"""

import math
from typing import Final

import triton
import triton.language as tl

from pallas_kernels.matmul.activations import CUBIC, SLOPE
from pallas_kernels.parts.jax_triton.arithmetic import hexadecimal

_LINEAR: Final = -2 * SLOPE * math.log2(math.e)
# $0 is the result, $1 is z, t becomes v log2(e) and then 1 + exp(v): z / (1 + exp(v)), with v = -z for silu.
_DIVIDE: Final = f"""
    ex2.approx.ftz.f32 t, t;
    add.rn.f32 t, t, {hexadecimal(1.0)};
    rcp.approx.ftz.f32 t, t;
    mul.rn.f32 $0, $1, t;
}}"""
_SILU: Final = tl.constexpr(f"""{{
    .reg .f32 t;
    mul.rn.f32 t, $1, {hexadecimal(-math.log2(math.e))};{_DIVIDE}""")
_GELU: Final = tl.constexpr(f"""{{
    .reg .f32 t;
    mul.rn.f32 t, $1, $1;
    fma.rn.f32 t, t, {hexadecimal(_LINEAR * CUBIC)}, {hexadecimal(_LINEAR)};
    mul.rn.f32 t, t, $1;{_DIVIDE}""")


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """Applies "gelu" (tanh form), "silu" or "relu" to a float32 tile; "" returns it unchanged."""
    if ACTIVATION == "silu":
        z = tl.inline_asm_elementwise(_SILU, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    elif ACTIVATION == "gelu":
        z = tl.inline_asm_elementwise(_GELU, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    elif ACTIVATION == "relu":
        z = tl.where(z <= 0.0, 0.0, z)  # nan stays nan
    return z
