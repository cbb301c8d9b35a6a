"""Bodies of the Triton kernels of the softmax family: sums in the order of portable programs."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import exponential, logarithm
from pallas_kernels.parts.jax_triton.rows import (
    add_lanes,
    held,
    number,
    piece,
    put,
    reciprocal,
    rows_of,
    starts,
    write,
    zeros,
)
from pallas_kernels.parts.jax_triton.softmax import exponentials, maximum_of, powers_of, sum_of_exponentials


@triton.jit
def softmax_kernel(x_ptr, count, y_ptr, EXACT: tl.constexpr, form: tl.constexpr):
    """Computes exp(x - m) * (1 / s), with the maximum m and s = sum(exp(x - m))."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    kept = held(x, rows, form)
    m = maximum_of(kept, x, rows, form)
    powers = exponentials(kept, m, EXACT, form)
    factor = reciprocal(sum_of_exponentials(powers, x, rows, m, EXACT, form))
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        found = powers_of(powers, x, rows, first, m, EXACT, form)
        for i in tl.static_range(PIECE):
            write(y_ptr, rows, first + i, found[i] * factor, form)


@triton.jit
def log_softmax_kernel(x_ptr, count, y_ptr, m_ptr, log_sum_ptr, EXACT: tl.constexpr, form: tl.constexpr):
    """Computes (x - m) - log(s)."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    kept = held(x, rows, form)
    m = maximum_of(kept, x, rows, form)
    log_sum = logarithm(sum_of_exponentials(exponentials(kept, m, EXACT, form), x, rows, m, EXACT, form))
    put(m_ptr, rows, m)
    put(log_sum_ptr, rows, log_sum)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            write(y_ptr, rows, first + i, (x_piece[i].to(tl.float32) - m) - log_sum, form)


@triton.jit
def logsumexp_kernel(x_ptr, count, m_ptr, log_sum_ptr, EXACT: tl.constexpr, form: tl.constexpr):
    """Computes m, or 0 where it is not finite, and log(s)."""
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    kept = held(x, rows, form)
    m = maximum_of(kept, x, rows, form)
    m = tl.where((m - m) == 0.0, m, 0.0)
    put(m_ptr, rows, m)
    powers = exponentials(kept, m, EXACT, form, POSITIVE=True)
    put(log_sum_ptr, rows, logarithm(sum_of_exponentials(powers, x, rows, m, EXACT, form, POSITIVE=True)))


@triton.jit
def softmax_gradient_kernel(y_ptr, g_ptr, count, dx_ptr, form: tl.constexpr):
    """Computes y * (g - sum(y * g))."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    y = starts(y_ptr, rows, form)
    g = starts(g_ptr, rows, form)
    ys = held(y, rows, form)
    gs = held(g, rows, form)
    lanes = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        y_piece = piece(ys, y, rows, first, form)
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            lanes += y_piece[i].to(tl.float32) * g_piece[i].to(tl.float32)
    total = add_lanes(lanes, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        y_piece = piece(ys, y, rows, first, form)
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            dx = y_piece[i].to(tl.float32) * (g_piece[i].to(tl.float32) - total)
            write(dx_ptr, rows, first + i, dx, form)


@triton.jit
def log_softmax_gradient_kernel(
    x_ptr, m_ptr, log_sum_ptr, g_ptr, count, dx_ptr, EXACT: tl.constexpr, form: tl.constexpr
):
    """Computes g - exp((x - m) - log_sum) * sum(g)."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    g = starts(g_ptr, rows, form)
    xs = held(x, rows, form)
    gs = held(g, rows, form)
    if form.held:
        m, log_sum = number(m_ptr, rows), number(log_sum_ptr, rows)
    lanes = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            lanes += g_piece[i].to(tl.float32)
    total = add_lanes(lanes, form)
    if not form.held:  # registers would be spilled if these were read before
        m, log_sum = number(m_ptr, rows), number(log_sum_ptr, rows)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(xs, x, rows, first, form)
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            share = exponential((x_piece[i].to(tl.float32) - m) - log_sum, EXACT)
            write(dx_ptr, rows, first + i, g_piece[i].to(tl.float32) - share * total, form)


@triton.jit
def logsumexp_gradient_kernel(x_ptr, m_ptr, log_sum_ptr, g_ptr, count, dx_ptr, EXACT: tl.constexpr, form: tl.constexpr):
    """Computes exp((x - m) - log_sum) * g."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    m = number(m_ptr, rows)
    log_sum = number(log_sum_ptr, rows)
    g = number(g_ptr, rows)
    kept = held(x, rows, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            z = (x_piece[i].to(tl.float32) - m) - log_sum
            write(dx_ptr, rows, first + i, exponential(z, EXACT) * g, form)
