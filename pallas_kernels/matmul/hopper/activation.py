"""Activations inside a Hopper kernel as a fixed sequence of PTX instructions, so that every kernel computes the same.

A compiler may contract a product and a sum to a fused multiply-add, depending on the surrounding code. An instruction
with an explicit rounding mode is never contracted. Silu and gelu (tanh form) are z / (1 + exp(v)): with v = -z, and
with v = -2 sqrt(2 / pi) (z + 0.044715 z**3), as (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)). The quotient is a product with
the reciprocal, which has an error of at most 1 ULP; exp is 2**(v log2(e)), whose relative error grows as |v| 2**-24.
"""

import math
from typing import Any, Final

import jax

from pallas_kernels.matmul.activations import CUBIC, SLOPE, activate
from pallas_kernels.parts.hopper.arithmetic import SILU
from pallas_kernels.parts.hopper.registers import apply_ptx, hexadecimal

_LINEAR: Final = -2 * SLOPE * math.log2(math.e)
# $0 is the result, $1 is z, t becomes v log2(e) and then 1 + exp(v).
_DIVIDE: Final = f"""
    ex2.approx.ftz.f32 t, t;
    add.rn.f32 t, t, {hexadecimal(1.0)};
    rcp.approx.ftz.f32 t, t;
    mul.rn.f32 $0, $1, t;
}}"""
_PTX: Final = {
    "silu": SILU,
    "gelu": f"""{{
    .reg .f32 t;
    mul.rn.f32 t, $1, $1;
    fma.rn.f32 t, t, {hexadecimal(_LINEAR * CUBIC)}, {hexadecimal(_LINEAR)};
    mul.rn.f32 t, t, $1;{_DIVIDE}""",
}


def activate_tile(z: jax.Array, activation: str | None, layout: Any, interpret: Any) -> jax.Array:
    """Applies the named activation to an array in the registers of a warpgroup; None returns it unchanged.

    Args:
        z: float32 of any shape.
        activation: "gelu" (tanh form), "silu", "relu" or None.
        layout: Layout of `z`.
        interpret: Whether the kernel runs in the interpreter, which computes the portable form.

    Returns:
        An array with the shape and layout of `z`. nan and infinities give the same results as in the portable form.
    """
    if interpret or activation not in _PTX:
        return activate(z, activation)
    return apply_ptx(_PTX[activation], layout, z)
