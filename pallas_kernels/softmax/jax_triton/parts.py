"""Triton kernels of the softmax family whose rows are shared by several programs: the results."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import logarithm
from pallas_kernels.parts.jax_triton.parts_of_rows import maximum_of_parts, put_once, sum_of_groups
from pallas_kernels.parts.jax_triton.rows import held, reciprocal, rows_of, starts, write
from pallas_kernels.parts.jax_triton.softmax import exponentials


@triton.jit
def softmax_of_sum_kernel(x_ptr, maxima_ptr, sums_ptr, count, y_ptr, EXACT: tl.constexpr, form: tl.constexpr):
    """Computes what `softmax_kernel` does from maxima and sums."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    kept = held(starts(x_ptr, rows, form), rows, form)
    m = maximum_of_parts(maxima_ptr, rows, form)
    factor = reciprocal(sum_of_groups(sums_ptr, rows, form))
    powers = exponentials(kept, m, EXACT, form)
    for i in tl.static_range(BLOCKS):
        write(y_ptr, rows, i, powers[i] * factor, form)


@triton.jit
def log_softmax_of_sum_kernel(x_ptr, maxima_ptr, sums_ptr, count, y_ptr, m_ptr, log_sum_ptr, form: tl.constexpr):
    """Computes what `log_softmax_kernel` does from maxima and sums."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    kept = held(starts(x_ptr, rows, form), rows, form)
    m = maximum_of_parts(maxima_ptr, rows, form)
    log_sum = logarithm(sum_of_groups(sums_ptr, rows, form))
    put_once(m_ptr, rows, m)
    put_once(log_sum_ptr, rows, log_sum)
    for i in tl.static_range(BLOCKS):
        write(y_ptr, rows, i, (kept[i].to(tl.float32) - m) - log_sum, form)
