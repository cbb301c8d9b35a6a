"""Matmul of float32 operands in TF32 on a Hopper GPU: JAX's default precision there.

wgmma reads float32 operands along K and truncates the lower 13 fraction bits. (N, K) weights are read in place; (K, N)
weights are transposed inside a separate kernel, or by a copy before it if estimated faster.
"""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Tf32Contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper.chain_ring import chain_matmul
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.matmul.hopper.operands import (
    check_chain,
    check_contract,
    check_device,
    check_operands,
    check_shared_memory,
    empty,
    one_axis,
    pad,
    pad_weights,
    unpad,
)
from pallas_kernels.matmul.hopper.ring import ring_matmul
from pallas_kernels.matmul.hopper.tf32_ring import transposing_ring_matmul
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule, chain_schedule
from pallas_kernels.matmul.schedule.hopper.tf32 import Tf32Schedule, tf32_schedule

_OP: Final = "pallas_kernels.matmul.hopper.tf32.matmul"
_ALIGN: Final = 4  # elements in the 16 bytes to which TMA aligns rows
_COLUMNS: Final = 8  # the same for rows of the result, also of 2-byte elements
_TRANSPOSED_COLUMNS: Final = 32  # elements of a swizzled row; narrower tiles need no more than their own columns
_TRANSPOSED_K: Final = 8


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: Tf32Contract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    schedule: Tf32Schedule | ChainSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies float32 rows by float32 weights in TF32, or every matrix of a stack by its own weights.

    Aligned operands are read in place: K a multiple of 4 and N of 8 for (N, K) weights, K a multiple of 8 and N
    of 32 for (K, N) weights. Others are copied once and zero-padded, which adds exact zeros to the sums.

    Both operands are truncated, not rounded, to 10 fraction bits: see `Tf32Contract` for the effect on a sum.

    Args:
        x: (M, K) or (..., M, K), float32. Any sizes, 0 included.
        w: (K, N) or (..., K, N) float32, or (N, K), (..., N, K) with `transpose_w`; the leading dimensions equal those
            of `x`, unless `x` is (M, K) and shared by all entries.
        contract: Order of the sum over K.
        transpose_w: Whether `w` is stored as (N, K).
        bias: (N,) of any floating dtype, added to the float32 sum.
        out_dtype: bfloat16, float16 or float32 (the default). The float32 value is rounded once.
        schedule: Tiles; chosen from the shape by default. The bits do not depend on it. A `ChainSchedule` for a single
            product.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU (where operands are not
            truncated).

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; the bits depend on K, the row, the weights and the bias alone, and are the same in a
    stack as in a single product.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w = jnp.ones((3, 64)), jnp.ones((64, 64))
        >>> matmul(x, w, contract=Tf32Contract(), interpret=plgpu.InterpretGPUParams())[0, :2].tolist()
        [64.0, 64.0]
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    bias = None if bias is None else bias.astype(jnp.float32)
    check_contract(_OP, contract, Tf32Contract)
    check_operands(_OP, x, w, bias, transpose_w, out_dtype, (jnp.dtype(jnp.float32),))
    if not interpret:
        check_device(_OP)
    (m, k), n, lead = x.shape[-2:], w.shape[-2 if transpose_w else -1], w.shape[:-2]
    if 0 in (*lead, m, k, n):
        return empty((*lead, m, n), bias, out_dtype)
    stack = math.prod(lead)
    arguments: dict[str, Any] = {"out_dtype": out_dtype, "interpret": interpret}
    if schedule is None and not lead:
        schedule = chain_schedule(m, k, n, itemsize=4, transpose_w=transpose_w)
    if isinstance(schedule, ChainSchedule):
        if lead:
            raise UnsupportedError(f"{_OP}: expected a Tf32Schedule for a stack of products, got {schedule}.")
        check_chain(_OP, schedule, 4, transpose_w)
        epilogue, columns = Epilogue(bias).padded(schedule.columns), _COLUMNS if transpose_w else schedule.columns
        x, w = pad(x, -1, _TRANSPOSED_K), pad_weights(w, transpose_w, _TRANSPOSED_K, columns)
        return unpad(chain_matmul(x, w, epilogue, schedule=schedule, transpose_w=transpose_w, **arguments), m, n)
    if schedule is None:
        schedule = tf32_schedule(m, k, n, stack=stack, transpose_w=transpose_w, out_itemsize=out_dtype.itemsize)
    check_shared_memory(_OP, schedule, schedule.shared_bytes(out_dtype.itemsize))
    x, w = one_axis(x), one_axis(w)
    if bias is not None:
        bias = pad(bias, 0, schedule.tiles.block_n)
    if (schedule.transposers or schedule.from_registers) and not transpose_w:
        w = pad(pad(w, -1, min(_TRANSPOSED_COLUMNS, schedule.tiles.block_n)), -2, _TRANSPOSED_K)
        out = transposing_ring_matmul(pad(x, -1, _TRANSPOSED_K), w, bias, schedule=schedule, **arguments)
    else:
        w = pad_weights(w if transpose_w else w.swapaxes(-1, -2), True, _ALIGN, _COLUMNS)
        out = ring_matmul(pad(x, -1, _ALIGN), w, Epilogue(bias), schedule=schedule.tiles, transpose_w=True, **arguments)
    return unpad(out, *lead, m, n)
