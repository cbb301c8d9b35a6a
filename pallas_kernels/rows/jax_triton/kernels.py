"""Body of the Triton kernel of sums: one row per program."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.rows import add_lanes, places


@triton.jit
def sum_kernel(x_ptr, y_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, DIVIDED: tl.constexpr):
    """Computes the sum of a row, +0 if it is zero, or the mean."""
    row = tl.program_id(0)
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        lanes += tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    total = add_lanes(lanes, LANES)
    total = tl.where(total == 0.0, 0.0, total)
    if DIVIDED:
        total = tl.div_rn(total, tl.full((), COLUMNS, tl.float32))
    tl.store(y_ptr + row, total)
