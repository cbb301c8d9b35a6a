"""Triton kernels of norms whose rows are shared by several programs: a sum, then the results."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.parts_of_rows import put_groups, put_once, sum_of_groups
from pallas_kernels.parts.jax_triton.rows import held, reciprocal_root, rows_of, starts, totals_of, vector, write, zeros


@triton.jit
def squares_kernel(x_ptr, residual_ptr, count, sums_ptr, HAS_RESIDUAL: tl.constexpr, form: tl.constexpr):
    """Writes the sums of h * h over groups of lanes, with h = x + residual."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    x, residual = starts(x_ptr, rows, form), starts(residual_ptr, rows, form)
    totals = totals_of(held(x, rows, form), x, residual, rows, 0, HAS_RESIDUAL, form)
    squares = zeros(tl.float32, form)
    for i in tl.static_range(BLOCKS):
        h = totals[i].to(tl.float32)
        squares += h * h
    put_groups(sums_ptr, rows, squares, form)


@triton.jit
def rms_norm_of_sum_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    sums_ptr,
    count,
    y_ptr,
    factor_ptr,
    total_ptr,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    form: tl.constexpr,
):
    """Computes what `rms_norm_kernel` does from the sums of squares."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    x, residual = starts(x_ptr, rows, form), starts(residual_ptr, rows, form)
    totals = totals_of(held(x, rows, form), x, residual, rows, 0, HAS_RESIDUAL, form)
    factor = reciprocal_root(sum_of_groups(sums_ptr, rows, form), EPS, form)
    put_once(factor_ptr, rows, factor)
    for i in tl.static_range(BLOCKS):
        if HAS_RESIDUAL:
            write(total_ptr, rows, i, totals[i], form)
        y = totals[i].to(tl.float32) * factor
        if HAS_WEIGHT:
            y = y * vector((), weight_ptr, i, form)
        write(y_ptr, rows, i, y, form)
