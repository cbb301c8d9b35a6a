"""Activations inside a Hopper kernel as a fixed sequence of PTX instructions, so that every kernel computes the same.

A compiler may contract a product and a sum to a fused multiply-add, depending on the surrounding code. An instruction
with an explicit rounding mode is never contracted.
"""

from typing import Any

import jax

from pallas_kernels.matmul.activation_ptx import ACTIVATION_PTX
from pallas_kernels.matmul.activations import activate
from pallas_kernels.parts.hopper.registers import apply_ptx


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
    if interpret or activation not in ACTIVATION_PTX:
        return activate(z, activation)
    return apply_ptx(ACTIVATION_PTX[activation], layout, z)
