"""Bodies of the Triton kernels of cross entropy; the softmax is never stored."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import exponential, logarithm
from pallas_kernels.parts.jax_triton.parts_of_rows import maximum_of_parts, sum_of_groups
from pallas_kernels.parts.jax_triton.rows import columns_of, held, number, piece, put, rows_of, starts, write
from pallas_kernels.parts.jax_triton.softmax import exponentials, maximum_of, sum_of_exponentials


@triton.jit
def cross_entropy_kernel(
    x_ptr,
    label_ptr,
    count,
    loss_ptr,
    m_ptr,
    log_sum_ptr,
    Z_LOSS: tl.constexpr,
    EXACT: tl.constexpr,
    form: tl.constexpr,
):
    """Computes log(s) - (x[label] - m) + z_loss * lse * lse.

    Here m is the maximum, s = sum(exp(x - m)) and lse = m + log(s).
    """
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    label = number(label_ptr, rows)
    place = tl.minimum(tl.maximum(label, 0), form.columns - 1)
    picked = tl.load(x + place, mask=rows.exists, other=0.0).to(tl.float32)
    kept = held(x, rows, form)
    m = maximum_of(kept, x, rows, form)
    log_sum = logarithm(sum_of_exponentials(exponentials(kept, m, EXACT, form), x, rows, m, EXACT, form))
    _write_loss((loss_ptr, m_ptr, log_sum_ptr), rows, label, picked, (m, log_sum), Z_LOSS, form)


@triton.jit
def cross_entropy_of_sum_kernel(
    x_ptr,
    label_ptr,
    maxima_ptr,
    sums_ptr,
    count,
    loss_ptr,
    m_ptr,
    log_sum_ptr,
    Z_LOSS: tl.constexpr,
    form: tl.constexpr,
):
    """Computes what `cross_entropy_kernel` does from the maxima and sums of rows that several programs share."""
    rows = rows_of(count, form)
    label = number(label_ptr, rows)
    place = tl.minimum(tl.maximum(label, 0), form.columns - 1)
    picked = tl.load(starts(x_ptr, rows, form) + place).to(tl.float32)
    m = maximum_of_parts(maxima_ptr, rows, form)
    log_sum = logarithm(sum_of_groups(sums_ptr, rows, form))
    if tl.program_id(1) == 0:
        _write_loss((loss_ptr, m_ptr, log_sum_ptr), rows, label, picked, (m, log_sum), Z_LOSS, form)


@triton.jit
def _write_loss(results, rows, label, picked, sums, Z_LOSS: tl.constexpr, form: tl.constexpr):
    loss_ptr, m_ptr, log_sum_ptr = results
    m, log_sum = sums
    loss = log_sum - (picked - m)
    if Z_LOSS != 0.0:
        lse = m + log_sum
        loss = loss + (Z_LOSS * lse) * lse
    loss = tl.where(label < form.columns, loss, float("nan"))
    put(loss_ptr, rows, tl.where(label < 0, 0.0, loss))
    put(m_ptr, rows, m)
    put(log_sum_ptr, rows, log_sum)


@triton.jit
def cross_entropy_gradient_kernel(
    x_ptr,
    label_ptr,
    m_ptr,
    log_sum_ptr,
    g_ptr,
    count,
    dx_ptr,
    TWICE_Z_LOSS: tl.constexpr,
    EXACT: tl.constexpr,
    form: tl.constexpr,
):
    """Computes softmax(x) * (g * (1 + 2 * z_loss * lse)), minus g at the label."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    label = number(label_ptr, rows)
    m = number(m_ptr, rows)
    log_sum = number(log_sum_ptr, rows)
    g = number(g_ptr, rows)
    scale = g
    if TWICE_Z_LOSS != 0.0:
        scale = g * (1.0 + TWICE_Z_LOSS * (m + log_sum))
    scale = tl.where(label < form.columns, scale, float("nan"))
    kept = held(x, rows, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        at = label - first * form.stride  # with columns of every block instead, registers are spilled
        for i in tl.static_range(PIECE):
            share = exponential((x_piece[i].to(tl.float32) - m) - log_sum, EXACT) * scale
            dx = tl.where(columns_of(0, form) == at - i * form.stride, share - g, share)
            write(dx_ptr, rows, first + i, tl.where(label < 0, 0.0, dx), form)
