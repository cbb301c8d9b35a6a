"""Rows of 128 columns in Triton kernels as blocks of 32, 64 or 128: what a thread has of all of them it adds itself."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import half_sums
from pallas_kernels.parts.jax_triton.rows import add_groups


@triton.jit
def sum_of_quarters(a, b, c, d, ROWS: tl.constexpr):
    """Adds four blocks (ROWS, 32) of rows to (ROWS, 1), in the order of `RowContract`: by a halving tree over 128."""
    return add_groups((a + c) + (b + d), ROWS, 32)


@triton.jit
def sum_of_blocks(blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds blocks (ROWS, WIDTH) of rows to (ROWS, 1), in the order of `sum_of_quarters`."""
    if WIDTH == 32:
        total = sum_of_quarters(blocks[0], blocks[1], blocks[2], blocks[3], ROWS)
    elif WIDTH == 64:
        total = add_groups(half_sums(blocks[0] + blocks[1], ROWS, 64, 32), ROWS, 32)
    else:
        total = add_groups(half_sums(blocks[0], ROWS, 128, 32), ROWS, 32)
    return total
