"""Body of the Triton kernel of the gated RMSNorm: rows of 128 columns, as four blocks of 32."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import in_float32, xla_silu
from pallas_kernels.parts.jax_triton.quarters import sum_of_quarters
from pallas_kernels.parts.jax_triton.rows import quotient, reciprocal


@triton.jit
def gated_rms_norm_kernel(x_ptr, gate_ptr, weight_ptr, count, y_ptr, form: tl.constexpr):
    """Computes x / sqrt(mean(x * x) + eps) * weight * silu(gate), each step rounded as in the kernels that it replaces.

    Row `r` has the gate at column `form.column + r % form.heads * 128` of row `r // form.heads` of the gates.
    """
    ROWS: tl.constexpr = form.rows
    HEADS: tl.constexpr = form.heads
    SOURCE: tl.constexpr = form.source
    COLUMN: tl.constexpr = form.column
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    there = row < count
    x_rows = x_ptr + row * 128
    gates = gate_ptr + row // HEADS * SOURCE + (COLUMN + row % HEADS * 128)
    columns = tl.arange(0, 32)[None, :]
    a = in_float32(tl.load(x_rows + columns, mask=there, other=0.0))
    b = in_float32(tl.load(x_rows + 32 + columns, mask=there, other=0.0))
    c = in_float32(tl.load(x_rows + 64 + columns, mask=there, other=0.0))
    d = in_float32(tl.load(x_rows + 96 + columns, mask=there, other=0.0))
    gate_a = tl.load(gates + columns, mask=there, other=0.0)
    gate_b = tl.load(gates + 32 + columns, mask=there, other=0.0)
    gate_c = tl.load(gates + 64 + columns, mask=there, other=0.0)
    gate_d = tl.load(gates + 96 + columns, mask=there, other=0.0)
    total = sum_of_quarters(a * a, b * b, c * c, d * d, ROWS)
    factor = reciprocal(tl.sqrt_rn(quotient(total, 128) + form.eps))
    y_rows = y_ptr + row * 128
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = _gated(a * factor, gate_a, weight_ptr, columns, form).to(dtype)
    tl.store(y_rows + columns, y, mask=there)
    y = _gated(b * factor, gate_b, weight_ptr, 32 + columns, form).to(dtype)
    tl.store(y_rows + 32 + columns, y, mask=there)
    y = _gated(c * factor, gate_c, weight_ptr, 64 + columns, form).to(dtype)
    tl.store(y_rows + 64 + columns, y, mask=there)
    y = _gated(d * factor, gate_d, weight_ptr, 96 + columns, form).to(dtype)
    tl.store(y_rows + 96 + columns, y, mask=there)


@triton.jit
def _gated(y, gate, weight_ptr, columns, form: tl.constexpr):
    if form.weighted:
        y = y * tl.load(weight_ptr + columns).to(tl.float32)
    return y * xla_silu(in_float32(gate))
