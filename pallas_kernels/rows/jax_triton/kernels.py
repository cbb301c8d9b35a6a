"""Bodies of the Triton kernels of sums: along rows and over rows."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.chunks import columns_of_row, sum_chunk, write_strip
from pallas_kernels.parts.jax_triton.rows import (
    add_lanes,
    held,
    of_columns,
    piece,
    put,
    quotient,
    rows_of,
    starts,
    zeros,
)


@triton.jit
def sum_kernel(x_ptr, count, y_ptr, DIVIDED: tl.constexpr, form: tl.constexpr):
    """Computes the sum of a row, +0 if it is zero, or the mean."""
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    total = _sum(held(x, rows, form), x, rows, form)
    if DIVIDED:
        total = quotient(total, form.columns)
    put(y_ptr, rows, total)


@triton.jit
def variance_kernel(x_ptr, count, y_ptr, mean_ptr, DIVISOR: tl.constexpr, form: tl.constexpr):
    """Computes sum(d * d) / DIVISOR, with d = x - mean, and the mean."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    kept = held(x, rows, form)
    mean = quotient(_sum(kept, x, rows, form), form.columns)
    squares = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            d = x_piece[i].to(tl.float32) - mean
            squares += of_columns(d * d, first + i, form)
    put(y_ptr, rows, quotient(add_lanes(squares, form), DIVISOR))
    put(mean_ptr, rows, mean)


@triton.jit
def sum_chunk_kernel(x_ptr, start_ptr, count, out_ptr, form: tl.constexpr):
    """Adds the rows of a chunk."""
    write_strip(out_ptr, start_ptr, sum_chunk(columns_of_row, x_ptr, count, form), form)


@triton.jit
def _sum(kept, x, rows, form: tl.constexpr):
    """Returns the sum of each row, +0 if it is zero."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    lanes = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            lanes += x_piece[i].to(tl.float32)
    total = add_lanes(lanes, form)
    return tl.where(total == 0.0, 0.0, total)
