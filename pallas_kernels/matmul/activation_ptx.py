"""The activations of products as PTX instructions, by name; see `pallas_kernels.parts.ptx`.

Silu and gelu (tanh form) are z / (1 + exp(v)): with v = -z, and with v = -2 sqrt(2 / pi) (z + 0.044715 z**3), as
(1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)). The exponential is 2**(v log2(e)), whose relative error grows as |v| 2**-24.
"""

import math
from typing import Final

from pallas_kernels.matmul.activations import CUBIC, SLOPE
from pallas_kernels.parts.ptx import SIGMOID_OF_T, SILU, hexadecimal

_LINEAR: Final = -2 * SLOPE * math.log2(math.e)

ACTIVATION_PTX: Final = {
    "silu": SILU,
    "gelu": f"""{{
    .reg .f32 t;
    mul.rn.f32 t, $1, $1;
    fma.rn.f32 t, t, {hexadecimal(_LINEAR * CUBIC)}, {hexadecimal(_LINEAR)};
    mul.rn.f32 t, t, $1;{SIGMOID_OF_T}""",
}
