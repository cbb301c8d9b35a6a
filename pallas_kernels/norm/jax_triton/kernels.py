"""Bodies of the Triton kernels of norms: every step is rounded as in the portable programs."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.chunks import columns_of_row, number_of_row, sum_chunk, write_strip
from pallas_kernels.parts.jax_triton.rows import (
    add_lanes,
    held,
    number,
    of_columns,
    piece,
    preloaded,
    put,
    quotient,
    read,
    read_vector,
    reciprocal_root,
    rows_of,
    starts,
    totals_of,
    vector,
    write,
    zeros,
)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    count,
    y_ptr,
    factor_ptr,
    total_ptr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    form: tl.constexpr,
):
    """Computes h * factor * w, with h = x + residual, factor = 1 / sqrt(sum(h * h) / C + EPS), w = weight + OFFSET."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    residual = starts(residual_ptr, rows, form)
    kept = held(x, rows, form)
    weight = preloaded(weight_ptr, HAS_WEIGHT, form)
    totals = ()
    squares = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        found = totals_of(kept, x, residual, rows, first, HAS_RESIDUAL, form)
        for i in tl.static_range(PIECE):
            if HAS_RESIDUAL:
                write(total_ptr, rows, first + i, found[i], form)
            h = found[i].to(tl.float32)
            squares += h * h
        if form.held:
            totals = found
    factor = reciprocal_root(add_lanes(squares, form), EPS, form)
    put(factor_ptr, rows, factor)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        if form.held:
            found = totals
        else:
            found = totals_of((), x, residual, rows, first, HAS_RESIDUAL, form)
        for i in tl.static_range(PIECE):
            y = found[i].to(tl.float32) * factor
            y = times_weight(y, weight, weight_ptr, first + i, HAS_WEIGHT, OFFSET, form)
            write(y_ptr, rows, first + i, y, form)


@triton.jit
def rms_norm_gradient_kernel(
    h_ptr,
    factor_ptr,
    g_ptr,
    weight_ptr,
    g_sum_ptr,
    count,
    dh_ptr,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SUM: tl.constexpr,
    form: tl.constexpr,
):
    """Computes factor * (gw - n * (sum(gw * n) / C)) + g_sum, with n = h * factor, gw = g * (weight + OFFSET)."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    h = starts(h_ptr, rows, form)
    g = starts(g_ptr, rows, form)
    hs = held(h, rows, form)
    gs = held(g, rows, form)
    factor = number(factor_ptr, rows)
    products = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        h_piece = piece(hs, h, rows, first, form)
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            normal = h_piece[i].to(tl.float32) * factor
            gw = weighted(g_piece[i].to(tl.float32), weight_ptr, first + i, HAS_WEIGHT, form, OFFSET)
            products += of_columns(gw * normal, first + i, form)
    mean = quotient(add_lanes(products, form), form.columns)
    g_sum = starts(g_sum_ptr, rows, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        h_piece = piece(hs, h, rows, first, form)
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            normal = h_piece[i].to(tl.float32) * factor
            gw = weighted(g_piece[i].to(tl.float32), weight_ptr, first + i, HAS_WEIGHT, form, OFFSET)
            dh = factor * (gw - normal * mean)
            if HAS_SUM:
                dh += read(g_sum, rows, first + i, form).to(tl.float32)
            write(dh_ptr, rows, first + i, dh, form)


@triton.jit
def layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    count,
    y_ptr,
    mean_ptr,
    factor_ptr,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    form: tl.constexpr,
):
    """Computes d * factor * weight + bias, with d = x - mean and factor = 1 / sqrt(sum(d * d) / C + EPS)."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    kept = held(x, rows, form)
    weight = preloaded(weight_ptr, HAS_WEIGHT, form)
    bias = preloaded(bias_ptr, HAS_BIAS, form)
    lanes = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            lanes += x_piece[i].to(tl.float32)
    mean = quotient(add_lanes(lanes, form), form.columns)
    lanes = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            d = x_piece[i].to(tl.float32) - mean
            lanes += of_columns(d * d, first + i, form)
    factor = reciprocal_root(add_lanes(lanes, form), EPS, form)
    put(mean_ptr, rows, mean)
    put(factor_ptr, rows, factor)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            y = (x_piece[i].to(tl.float32) - mean) * factor
            if HAS_WEIGHT:
                y = y * vector(weight, weight_ptr, first + i, form)
            if HAS_BIAS:
                y = y + vector(bias, bias_ptr, first + i, form)
            write(y_ptr, rows, first + i, y, form)


@triton.jit
def layer_norm_gradient_kernel(
    x_ptr,
    mean_ptr,
    factor_ptr,
    g_ptr,
    weight_ptr,
    count,
    dx_ptr,
    HAS_WEIGHT: tl.constexpr,
    form: tl.constexpr,
):
    """Computes factor * (gw - sum(gw) / C - n * (sum(gw * n) / C)).

    Here n = (x - mean) * factor and gw = g * weight.
    """
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    g = starts(g_ptr, rows, form)
    xs = held(x, rows, form)
    gs = held(g, rows, form)
    mean = number(mean_ptr, rows)
    factor = number(factor_ptr, rows)
    products = zeros(tl.float32, form)
    cotangents = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(xs, x, rows, first, form)
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            normal = (x_piece[i].to(tl.float32) - mean) * factor
            gw = weighted(g_piece[i].to(tl.float32), weight_ptr, first + i, HAS_WEIGHT, form)
            products += of_columns(gw * normal, first + i, form)
            cotangents += gw
    product_mean = quotient(add_lanes(products, form), form.columns)
    cotangent_mean = quotient(add_lanes(cotangents, form), form.columns)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        x_piece = piece(xs, x, rows, first, form)
        g_piece = piece(gs, g, rows, first, form)
        for i in tl.static_range(PIECE):
            normal = (x_piece[i].to(tl.float32) - mean) * factor
            gw = weighted(g_piece[i].to(tl.float32), weight_ptr, first + i, HAS_WEIGHT, form)
            write(dx_ptr, rows, first + i, factor * (gw - cotangent_mean - normal * product_mean), form)


@triton.jit
def weight_gradient_kernel(
    h_ptr, factor_ptr, g_ptr, mean_ptr, start_ptr, count, out_ptr, HAS_MEAN: tl.constexpr, form: tl.constexpr
):
    """Adds g * ((h - mean) * factor) over the rows of a chunk."""
    if HAS_MEAN:
        total = sum_chunk(_centred, (h_ptr, factor_ptr, g_ptr, mean_ptr), count, form)
    else:
        total = sum_chunk(_scaled, (h_ptr, factor_ptr, g_ptr), count, form)
    write_strip(out_ptr, start_ptr, total, form)


@triton.jit
def _scaled(arrays, row, columns, exists, form: tl.constexpr):
    normal = columns_of_row(arrays[0], row, columns, exists, form) * number_of_row(arrays[1], row, exists)
    return columns_of_row(arrays[2], row, columns, exists, form) * normal


@triton.jit
def _centred(arrays, row, columns, exists, form: tl.constexpr):
    d = columns_of_row(arrays[0], row, columns, exists, form) - number_of_row(arrays[3], row, exists)
    normal = d * number_of_row(arrays[1], row, exists)
    return columns_of_row(arrays[2], row, columns, exists, form) * normal


@triton.jit
def weighted(g, weight_ptr, block, HAS_WEIGHT: tl.constexpr, form: tl.constexpr, OFFSET: tl.constexpr = 0.0):
    """Returns a block (R, L) times the weights plus an offset, or times those of both that there are."""
    if HAS_WEIGHT:
        g = g * _with_offset(read_vector(weight_ptr, block, form).to(tl.float32), OFFSET)
    elif OFFSET != 0.0:
        g = g * OFFSET
    return g


@triton.jit
def times_weight(y, kept, weight_ptr, block, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr, form: tl.constexpr):
    """Does what `weighted` does with weights that may be in registers."""
    if HAS_WEIGHT:
        y = y * _with_offset(vector(kept, weight_ptr, block, form), OFFSET)
    elif OFFSET != 0.0:
        y = y * OFFSET
    return y


@triton.jit
def _with_offset(weight, OFFSET: tl.constexpr):
    if OFFSET != 0.0:
        weight = weight + OFFSET
    return weight
