"""Activations in Triton kernels as fixed sequences of PTX instructions, with explicit rounding.

They are the sequences of the kernels for Hopper, and have their contract (`pallas_kernels.contract.PTX_FUNCTIONS`).
"""

from typing import Final

import triton
import triton.language as tl

from pallas_kernels.matmul.activation_ptx import ACTIVATION_PTX

_SILU: Final = tl.constexpr(ACTIVATION_PTX["silu"])
_GELU: Final = tl.constexpr(ACTIVATION_PTX["gelu"])


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
