"""Bodies of the Triton kernels that quantise rows: every step but silu is rounded as in the portable programs."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import narrow, silu
from pallas_kernels.parts.jax_triton.rows import (
    Rows,
    add_lanes,
    held,
    number,
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

_LEAST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def quantize_kernel(
    x_ptr,
    smooth_ptr,
    place_ptr,
    expert_ptr,
    sources,
    experts,
    count,
    y_ptr,
    scale_ptr,
    HAS_SMOOTH: tl.constexpr,
    HAS_PLACE: tl.constexpr,
    HAS_EXPERT: tl.constexpr,
    GATED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    form: tl.constexpr,
):
    """Quantises x * smooth, or silu(gate) * up * smooth, of the row of `x` that `place` names."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    source = rows.index
    if HAS_PLACE:
        source = tl.minimum(tl.maximum(number(place_ptr, rows), 0), sources - 1).to(tl.int64)
    if GATED:
        x = x_ptr + source * (2 * form.columns)
    else:
        x = x_ptr + source * form.columns
    smooth = smooth_ptr
    used = rows.exists
    expert = tl.zeros_like(rows.index)
    if HAS_EXPERT:
        expert = number(expert_ptr, rows).to(tl.int64)
        used = expert >= 0
        smooth = smooth_ptr + tl.minimum(tl.maximum(expert, 0), experts - 1) * form.columns
    kept = ()
    lanes = zeros(tl.int32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        h = _smoothed(x, smooth, rows, first, HAS_SMOOTH, HAS_EXPERT, GATED, form)
        for i in tl.static_range(PIECE):
            lanes = tl.maximum(lanes, _magnitude(h[i]))
        if form.held:
            kept = h
    scale, good = _scale(lanes, LARGEST)
    scale_or_nan = tl.where(good, scale, float("nan"))
    if HAS_EXPERT:
        unused = tl.where(expert == -1, 0.0, float("nan"))
        scale_or_nan = tl.where(used, scale_or_nan, unused)
        good = good & used
    put(scale_ptr, rows, scale_or_nan)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        if form.held:
            h = kept
        else:
            h = _smoothed(x, smooth, rows, first, HAS_SMOOTH, HAS_EXPERT, GATED, form)
        for i in tl.static_range(PIECE):
            write(y_ptr, rows, first + i, narrow(h[i], scale, good, INTEGER), form)


@triton.jit
def quantize_norm_kernel(
    x_ptr,
    weight_ptr,
    smooth_ptr,
    residual_ptr,
    count,
    y_ptr,
    scale_ptr,
    total_ptr,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    form: tl.constexpr,
):
    """Quantises h * factor * weight * smooth, with h = x + residual and factor = 1 / sqrt(sum(h * h) / C + EPS)."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    residual = starts(residual_ptr, rows, form)
    kept = held(x, rows, form)
    scales = (preloaded(weight_ptr, HAS_WEIGHT, form), preloaded(smooth_ptr, HAS_SMOOTH, form))
    pointers = (weight_ptr, smooth_ptr)
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
    normal = ()
    lanes = zeros(tl.int32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        if form.held:
            found = totals
        else:
            found = totals_of((), x, residual, rows, first, HAS_RESIDUAL, form)
        h = _scaled(found, factor, scales, pointers, first, HAS_WEIGHT, HAS_SMOOTH, form)
        for i in tl.static_range(PIECE):
            lanes = tl.maximum(lanes, _magnitude(h[i]))
        if form.held:
            normal = h
    scale, good = _scale(lanes, LARGEST)
    put(scale_ptr, rows, tl.where(good, scale, float("nan")))
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        if form.held:
            h = normal
        else:
            found = totals_of((), x, residual, rows, first, HAS_RESIDUAL, form)
            h = _scaled(found, factor, scales, pointers, first, HAS_WEIGHT, HAS_SMOOTH, form)
        for i in tl.static_range(PIECE):
            write(y_ptr, rows, first + i, narrow(h[i], scale, good, INTEGER), form)


@triton.jit
def _smoothed(
    x,
    smooth,
    rows: Rows,
    first,
    HAS_SMOOTH: tl.constexpr,
    HAS_EXPERT: tl.constexpr,
    GATED: tl.constexpr,
    form: tl.constexpr,
):
    """Returns the blocks of a piece of the rows, in float32, times the smooth scales."""
    PIECE: tl.constexpr = form.piece
    blocks = ()
    xs = piece(held(x, rows, form), x, rows, first, form)
    for i in tl.static_range(PIECE):
        h = xs[i].to(tl.float32)
        if GATED:
            h = silu(h) * read(x + form.columns, rows, first + i, form).to(tl.float32)
        if HAS_SMOOTH:
            if HAS_EXPERT:
                h = h * read(smooth, rows, first + i, form).to(tl.float32)
            else:
                h = h * read_vector(smooth, first + i, form).to(tl.float32)
        blocks = blocks + (h,)
    return blocks


@triton.jit
def _scaled(
    totals,
    factor,
    scales,
    pointers,
    first,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    form: tl.constexpr,
):
    """Returns the blocks of a piece of totals * factor, times the weight and the smooth scales."""
    PIECE: tl.constexpr = form.piece
    blocks = ()
    for i in tl.static_range(PIECE):
        h = totals[i].to(tl.float32) * factor
        if HAS_WEIGHT:
            h = h * vector(scales[0], pointers[0], first + i, form)
        if HAS_SMOOTH:
            h = h * vector(scales[1], pointers[1], first + i, form)
        blocks = blocks + (h,)
    return blocks


@triton.jit
def _magnitude(h):
    """Returns the bits of abs(h), which sort like the numbers; inf and nan are last."""
    return h.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(lanes, LARGEST: tl.constexpr):
    """Returns the scale (R, 1) for the largest magnitude of rows, at least 2**-126, and whether it is finite."""
    largest = tl.max(lanes, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    scale = quotient(largest, LARGEST)
    scale = tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)
    return scale, scale < float("inf")
