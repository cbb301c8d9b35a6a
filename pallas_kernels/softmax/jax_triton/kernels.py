"""Bodies of the Triton kernels of the softmax family: one row per program, sums in the order of portable programs."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import exponential, logarithm
from pallas_kernels.parts.jax_triton.rows import add_lanes, places


@triton.jit
def softmax_kernel(x_ptr, y_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Computes exp(x - m) * (1 / s), with the maximum m and s = sum(exp(x - m))."""
    row = tl.program_id(0)
    m = _maximum(x_ptr, row, COLUMNS, LANES, BLOCKS)
    s = _sum_of_exponentials(x_ptr, row, m, COLUMNS, LANES, BLOCKS)
    reciprocal = tl.div_rn(tl.full((), 1.0, tl.float32), s)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        x = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        y = exponential(x - m) * reciprocal
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def log_softmax_kernel(
    x_ptr, y_ptr, m_ptr, log_sum_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr
):
    """Computes (x - m) - log(s)."""
    row = tl.program_id(0)
    m = _maximum(x_ptr, row, COLUMNS, LANES, BLOCKS)
    log_sum = logarithm(_sum_of_exponentials(x_ptr, row, m, COLUMNS, LANES, BLOCKS))
    tl.store(m_ptr + row, m)
    tl.store(log_sum_ptr + row, log_sum)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        x = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        tl.store(y_ptr + offsets, ((x - m) - log_sum).to(y_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def logsumexp_kernel(x_ptr, m_ptr, log_sum_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Computes m, or 0 where it is not finite, and log(s)."""
    row = tl.program_id(0)
    m = _maximum(x_ptr, row, COLUMNS, LANES, BLOCKS)
    m = tl.where((m - m) == 0.0, m, 0.0)
    tl.store(m_ptr + row, m)
    tl.store(log_sum_ptr + row, logarithm(_sum_of_exponentials(x_ptr, row, m, COLUMNS, LANES, BLOCKS)))


@triton.jit
def softmax_gradient_kernel(y_ptr, g_ptr, dx_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Computes y * (g - sum(y * g))."""
    row = tl.program_id(0)
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        y = tl.load(y_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        lanes += y * tl.load(g_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    total = add_lanes(lanes, LANES)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        y = tl.load(y_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, (y * (g - total)).to(dx_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def log_softmax_gradient_kernel(
    x_ptr, m_ptr, log_sum_ptr, g_ptr, dx_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr
):
    """Computes g - exp((x - m) - log_sum) * sum(g)."""
    row = tl.program_id(0)
    m, log_sum = tl.load(m_ptr + row), tl.load(log_sum_ptr + row)
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        lanes += tl.load(g_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    total = add_lanes(lanes, LANES)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        x = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        dx = g - exponential((x - m) - log_sum) * total
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def logsumexp_gradient_kernel(
    x_ptr, m_ptr, log_sum_ptr, g_ptr, dx_ptr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr
):
    """Computes exp((x - m) - log_sum) * g."""
    row = tl.program_id(0)
    m, log_sum, g = tl.load(m_ptr + row), tl.load(log_sum_ptr + row), tl.load(g_ptr + row)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        x = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        dx = exponential((x - m) - log_sum) * g
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def _maximum(x_ptr, row, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns the maximum of a row; any number where the row holds a nan, which its consumers encounter anyway."""
    lanes = tl.full((LANES,), float("-inf"), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        lanes = tl.maximum(lanes, tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=float("-inf")).to(tl.float32))
    return tl.max(lanes, axis=0)


@triton.jit
def _sum_of_exponentials(x_ptr, row, m, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    lanes = tl.zeros((LANES,), tl.float32)
    for block in range(BLOCKS):
        columns, offsets = places(row, block, COLUMNS, LANES)
        x = tl.load(x_ptr + offsets, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        lanes += tl.where(columns < COLUMNS, exponential(x - m), 0.0)
    return add_lanes(lanes, LANES)
