"""Body of the Triton kernel that adds the rows of a token's experts: a program has some columns of a token."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import in_float32


@triton.jit
def sum_kernel(rows_ptr, row_ptr, weight_ptr, out_ptr, TOPK: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Adds the rows of a token, each times its weight, in the order of its experts; the launch fuses nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    # All rows are asked for before the first one is added.
    ats = ()
    for i in tl.static_range(TOPK):
        ats = ats + (tl.load(row_ptr + token * TOPK + i),)
    read = ()
    for i in tl.static_range(TOPK):
        at = tl.maximum(ats[i], 0).to(tl.int64)
        read = read + (tl.load(rows_ptr + at * COLUMNS + column),)
    total = _weighted(read[0], weight_ptr + token * TOPK, ats[0])
    for i in tl.static_range(1, TOPK):
        total = total + _weighted(read[i], weight_ptr + token * TOPK + i, ats[i])
    total = tl.where(total == 0.0, 0.0, total)
    tl.store(out_ptr + token * COLUMNS + column, total.to(out_ptr.dtype.element_ty))


@triton.jit
def _weighted(read, weight_ptr, at):
    return tl.where(at >= 0, in_float32(read) * tl.load(weight_ptr).to(tl.float32), 0.0)
