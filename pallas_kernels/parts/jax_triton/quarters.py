"""Rows of 128 columns in Triton kernels as four blocks of 32: a thread has numbers of all four, and adds them."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.rows import add_groups


@triton.jit
def sum_of_quarters(a, b, c, d, ROWS: tl.constexpr):
    """Adds four blocks (ROWS, 32) of rows to (ROWS, 1), in the order of `RowContract`: by a halving tree over 128."""
    return add_groups((a + c) + (b + d), ROWS, 32)
