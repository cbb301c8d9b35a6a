"""A kernel for the tests of launching: a product and a sum, which may be fused."""

import triton
import triton.language as tl


@triton.jit
def multiply_add(x_ptr, y_ptr, size, z_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size, other=0.0)
    y = tl.load(y_ptr + places, mask=places < size, other=0.0)
    tl.store(z_ptr + places, x * y + x, mask=places < size)
