"""Triton kernels of norms whose rows are shared by several programs: a kernel for each sum, then the results.

All of a row that a program has and all vectors are read before anything is written: a read stays after the writes
before it, and would be waited for.
"""

import triton
import triton.language as tl

from pallas_kernels.norm.jax_triton.kernels import times_weight, weighted
from pallas_kernels.parts.jax_triton.parts_of_rows import put_groups, put_once, sum_of_groups
from pallas_kernels.parts.jax_triton.rows import (
    held,
    number,
    of_columns,
    preloaded,
    quotient,
    reciprocal_root,
    rows_of,
    starts,
    totals_of,
    vector,
    write,
    zeros,
)


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
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    form: tl.constexpr,
):
    """Computes what `rms_norm_kernel` does from the sums of squares."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    x, residual = starts(x_ptr, rows, form), starts(residual_ptr, rows, form)
    totals = totals_of(held(x, rows, form), x, residual, rows, 0, HAS_RESIDUAL, form)
    weight = preloaded(weight_ptr, HAS_WEIGHT, form)
    factor = reciprocal_root(sum_of_groups(sums_ptr, rows, form), EPS, form)
    put_once(factor_ptr, rows, factor)
    for i in tl.static_range(BLOCKS):
        if HAS_RESIDUAL:
            write(total_ptr, rows, i, totals[i], form)
        y = times_weight(totals[i].to(tl.float32) * factor, weight, weight_ptr, i, HAS_WEIGHT, OFFSET, form)
        write(y_ptr, rows, i, y, form)


@triton.jit
def rms_norm_products_kernel(
    h_ptr,
    factor_ptr,
    g_ptr,
    weight_ptr,
    count,
    sums_ptr,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    form: tl.constexpr,
):
    """Writes the sums of gw * n over groups of lanes, with n = h * factor and gw = g * (weight + OFFSET)."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    hs, gs = held(starts(h_ptr, rows, form), rows, form), held(starts(g_ptr, rows, form), rows, form)
    factor = number(factor_ptr, rows)
    products = zeros(tl.float32, form)
    for i in tl.static_range(BLOCKS):
        normal = hs[i].to(tl.float32) * factor
        gw = weighted(gs[i].to(tl.float32), weight_ptr, i, HAS_WEIGHT, form, OFFSET)
        products += of_columns(gw * normal, i, form)
    put_groups(sums_ptr, rows, products, form)


@triton.jit
def rms_norm_gradient_of_sum_kernel(
    h_ptr,
    factor_ptr,
    g_ptr,
    weight_ptr,
    g_sum_ptr,
    sums_ptr,
    count,
    dh_ptr,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SUM: tl.constexpr,
    form: tl.constexpr,
):
    """Computes what `rms_norm_gradient_kernel` does from the sums of products."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    hs, gs = held(starts(h_ptr, rows, form), rows, form), held(starts(g_ptr, rows, form), rows, form)
    weight = preloaded(weight_ptr, HAS_WEIGHT, form)
    added = ()
    if HAS_SUM:
        added = held(starts(g_sum_ptr, rows, form), rows, form)
    factor = number(factor_ptr, rows)
    mean = quotient(sum_of_groups(sums_ptr, rows, form), form.columns)
    for i in tl.static_range(BLOCKS):
        normal = hs[i].to(tl.float32) * factor
        gw = times_weight(gs[i].to(tl.float32), weight, weight_ptr, i, HAS_WEIGHT, OFFSET, form)
        dh = factor * (gw - normal * mean)
        if HAS_SUM:
            dh += added[i].to(tl.float32)
        write(dh_ptr, rows, i, dh, form)


@triton.jit
def sums_kernel(x_ptr, count, sums_ptr, form: tl.constexpr):
    """Writes the sums of x over groups of lanes."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    xs = held(starts(x_ptr, rows, form), rows, form)
    lanes = zeros(tl.float32, form)
    for i in tl.static_range(BLOCKS):
        lanes += xs[i].to(tl.float32)
    put_groups(sums_ptr, rows, lanes, form)


@triton.jit
def deviations_kernel(x_ptr, sums_ptr, count, squares_ptr, form: tl.constexpr):
    """Writes the sums of d * d over groups of lanes, with d = x - mean, from the sums of x."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    xs = held(starts(x_ptr, rows, form), rows, form)
    mean = quotient(sum_of_groups(sums_ptr, rows, form), form.columns)
    lanes = zeros(tl.float32, form)
    for i in tl.static_range(BLOCKS):
        d = xs[i].to(tl.float32) - mean
        lanes += of_columns(d * d, i, form)
    put_groups(squares_ptr, rows, lanes, form)


@triton.jit
def layer_norm_of_sums_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    sums_ptr,
    squares_ptr,
    count,
    y_ptr,
    mean_ptr,
    factor_ptr,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    form: tl.constexpr,
):
    """Computes what `layer_norm_kernel` does from the sums of x and of the squares of its deviations."""
    BLOCKS: tl.constexpr = form.blocks
    rows = rows_of(count, form)
    xs = held(starts(x_ptr, rows, form), rows, form)
    weight = preloaded(weight_ptr, HAS_WEIGHT, form)
    bias = preloaded(bias_ptr, HAS_BIAS, form)
    mean = quotient(sum_of_groups(sums_ptr, rows, form), form.columns)
    factor = reciprocal_root(sum_of_groups(squares_ptr, rows, form), EPS, form)
    put_once(mean_ptr, rows, mean)
    put_once(factor_ptr, rows, factor)
    for i in tl.static_range(BLOCKS):
        y = (xs[i].to(tl.float32) - mean) * factor
        if HAS_WEIGHT:
            y = y * vector(weight, weight_ptr, i, form)
        if HAS_BIAS:
            y = y + vector(bias, bias_ptr, i, form)
        write(y_ptr, rows, i, y, form)
