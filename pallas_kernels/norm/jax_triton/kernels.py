"""Bodies of the Triton kernels of norms: one row per program, every step rounded as in the portable programs."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.rows import mean_of, places


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    y_ptr,
    factor_ptr,
    total_ptr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Computes h * factor * weight, with h = x + residual and factor = 1 / sqrt(sum(h * h) / COLUMNS + EPS)."""
    row = tl.program_id(0)
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        h = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            h += tl.load(residual_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
            total = h.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + offsets, total, mask=columns < COLUMNS)
            h = total.to(tl.float32)
        lanes += h * h
    mean = mean_of(lanes, COLUMNS, LANES)
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean + EPS))
    tl.store(factor_ptr + row, factor)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        h = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            h += tl.load(residual_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
            h = h.to(total_ptr.dtype.element_ty).to(tl.float32)
        y = h * factor
        if HAS_WEIGHT:
            y = y * tl.load(weight_ptr + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def rms_norm_gradient_kernel(
    h_ptr,
    factor_ptr,
    g_ptr,
    weight_ptr,
    g_sum_ptr,
    dh_ptr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SUM: tl.constexpr,
):
    """Computes factor * (gw - n * (sum(gw * n) / COLUMNS)) + g_sum, with n = h * factor and gw = g * weight."""
    row = tl.program_id(0)
    factor = tl.load(factor_ptr + row)
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        normal = tl.load(h_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32) * factor
        gw = _weighted(g_ptr + offsets, weight_ptr + columns, columns < COLUMNS, HAS_WEIGHT)
        lanes += tl.where(columns < COLUMNS, gw * normal, 0.0)
    mean = mean_of(lanes, COLUMNS, LANES)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        normal = tl.load(h_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32) * factor
        gw = _weighted(g_ptr + offsets, weight_ptr + columns, columns < COLUMNS, HAS_WEIGHT)
        dh = factor * (gw - normal * mean)
        if HAS_SUM:
            dh += tl.load(g_sum_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        tl.store(dh_ptr + offsets, dh.to(dh_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    factor_ptr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Computes d * factor * weight + bias, with d = x - mean and factor = 1 / sqrt(sum(d * d) / COLUMNS + EPS)."""
    row = tl.program_id(0)
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        lanes += tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    mean = mean_of(lanes, COLUMNS, LANES)
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        d = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32) - mean
        lanes += tl.where(columns < COLUMNS, d * d, 0.0)
    variance = mean_of(lanes, COLUMNS, LANES)
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(variance + EPS))
    tl.store(mean_ptr + row, mean)
    tl.store(factor_ptr + row, factor)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        y = (tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32) - mean) * factor
        if HAS_WEIGHT:
            y = y * tl.load(weight_ptr + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def layer_norm_gradient_kernel(
    x_ptr,
    mean_ptr,
    factor_ptr,
    g_ptr,
    weight_ptr,
    dx_ptr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Computes factor * (gw - sum(gw) / COLUMNS - n * (sum(gw * n) / COLUMNS)).

    Here n = (x - mean) * factor and gw = g * weight.
    """
    row = tl.program_id(0)
    mean, factor = tl.load(mean_ptr + row), tl.load(factor_ptr + row)
    products = tl.zeros((LANES,), tl.float32)
    cotangents = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        normal = (tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32) - mean) * factor
        gw = _weighted(g_ptr + offsets, weight_ptr + columns, columns < COLUMNS, HAS_WEIGHT)
        products += tl.where(columns < COLUMNS, gw * normal, 0.0)
        cotangents += gw
    product_mean = mean_of(products, COLUMNS, LANES)
    cotangent_mean = mean_of(cotangents, COLUMNS, LANES)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        normal = (tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32) - mean) * factor
        gw = _weighted(g_ptr + offsets, weight_ptr + columns, columns < COLUMNS, HAS_WEIGHT)
        dx = factor * (gw - cotangent_mean - normal * product_mean)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def _weighted(g_ptrs, weight_ptrs, mask, HAS_WEIGHT: tl.constexpr):
    g = tl.load(g_ptrs, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        g = g * tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    return g
