"""The logarithm to base 2 of CUDA's libdevice, which Triton's kernels take too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import count, number_of, with_number
from pallas_kernels.parts.hopper.tile import ROW


def log2(x: jax.Array, interpret: bool, layout: Any = ROW) -> jax.Array:
    """Returns the logarithm to base 2 of float32 numbers that a warpgroup holds.

    Args:
        x: The numbers.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        layout: How the warpgroup holds them.
    """
    if interpret:
        return jnp.log2(x)

    @inline(layout, result=held(x.shape, layout))
    def apply(x: Any) -> Any:
        registers = np.copy(x.registers)
        for at in range(registers.size):
            register = registers.flat[at]
            for i in range(count(register)):
                register = with_number(register, mlir_math.log2(number_of(register, i)), i)
            registers.flat[at] = register
        return fragmented(registers, x.layout)

    return apply(x)
