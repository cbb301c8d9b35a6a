"""Products of 8-bit matrices on a Hopper GPU, summed by wgmma and rescaled in the epilogue."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Float8Contract, QuantContract, honour
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.matmul.hopper.group_tiles import MOST_GROUPS
from pallas_kernels.matmul.hopper.operand import SWIZZLE_BYTES
from pallas_kernels.matmul.hopper.operands import (
    check_device,
    check_result,
    check_shared_memory,
    pad,
    pad_weights,
    unpad,
)
from pallas_kernels.matmul.hopper.ring import ring_matmul
from pallas_kernels.matmul.schedule.hopper.group_matmul import bytes_in_groups, holds_groups
from pallas_kernels.matmul.schedule.hopper.int8 import (
    float8_schedule,
    folds_blocks,
    int8_schedule,
    takes_integers,
    transposes_weights,
)
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_OP: Final = "pallas_kernels.matmul.hopper.int8.quant_matmul"
_ALIGN: Final = 16  # elements in the 16 bytes to which TMA aligns rows of K
_COLUMNS: Final = 8  # the same for rows of the result
_TRANSPOSED_COLUMNS: Final = 32  # columns of the narrowest swizzled tile
_CONTRACTS: Final[dict[Any, Any]] = {
    jnp.dtype(jnp.int8): QuantContract(),
    jnp.dtype(jnp.float8_e4m3fn): Float8Contract("wgmma32"),
}


def _serves(x: Any, w: Any, *_: Any, sizes: Any = None, **__: Any) -> bool:
    fit = sizes is None or w.shape[0] <= MOST_GROUPS
    return fit and x.dtype == w.dtype and x.dtype in _CONTRACTS and 0 not in (*x.shape, *w.shape)


@served_if(_serves, f"int8 or float8_e4m3fn operands that are not empty, and at most {MOST_GROUPS} groups")
def quant_matmul(
    x: jax.Array,
    w: jax.Array,
    row_scale: jax.Array,
    column_scale: jax.Array,
    *,
    contract: QuantContract | Float8Contract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    sizes: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    schedule: MatmulSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns (x @ w) * row_scale * column_scale + bias, for rows in groups each with the weights of its group.

    Integer sums are exact, float8 sums follow `Float8Contract`. The rest is computed in float32 from left to right and
    then rounded to `out_dtype`. Operands are read in place if K is a multiple of 16, and N a multiple of 8 for (N, K)
    weights, of 32 for (K, N); others are copied and zero-padded. (K, N) weights are transposed in shared memory if
    int8, copied if float8_e4m3fn.

    Args:
        x: (M, K) int8 or float8_e4m3fn, not empty; sorted by group with `sizes`.
        w: (K, N) of the dtype of `x`, or (G, K, N) with `sizes`; at most 1024 groups. The largest integer sum must fit
            in int32.
        row_scale: (M,) float32.
        column_scale: (N,) of any float dtype, or (G, N).
        contract: Order of the sums and of the scales.
        transpose_w: Whether `w` is stored as (N, K), or (G, N, K).
        bias: (N,) of any float dtype, or None; none with `sizes`.
        sizes: (G,) int32, the number of rows of each group; None for one weight matrix.
        out_dtype: bfloat16, float16 or float32.
        schedule: Tiles; chosen from the shape by default. The bits do not depend on it.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) of `out_dtype`. Rows after the last group are zeros. If sizes are negative or add up to more than M,
        the whole result is nan.

    Raises:
        UnsupportedError: If this backend does not support the operands or the contract.

    Guarantee: row-invariant; integer sums are exact in every order.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w, one = jnp.ones((3, 128), jnp.int8), jnp.ones((128, 64), jnp.int8), jnp.ones(64)
        >>> y = quant_matmul(
        ...     x, w, 0.5 * one[:3], one, contract=QuantContract(), interpret=plgpu.InterpretGPUParams()
        ... )
        >>> y[0, :2].tolist()
        [64.0, 64.0]
    """
    honour(_OP, contract, _CONTRACTS[x.dtype])
    folded = isinstance(contract, Float8Contract)
    if folded and not transpose_w:
        w, transpose_w = w.swapaxes(-1, -2), True
    out_dtype = jnp.dtype(out_dtype)
    _check(x, w, row_scale, column_scale, transpose_w, bias, sizes, out_dtype)
    if not interpret:
        check_device(_OP)
    (m, k), n = x.shape, w.shape[-2 if transpose_w else -1]
    x, w = pad(x, -1, _ALIGN), pad_weights(w, transpose_w, _ALIGN, _COLUMNS if transpose_w else _TRANSPOSED_COLUMNS)
    if schedule is None:
        groups = None if sizes is None else sizes.shape[0]
        options = {"groups": groups, "out_itemsize": out_dtype.itemsize}
        schedule = (
            float8_schedule(m, k, n, **options)
            if folded
            else int8_schedule(m, k, n, transposed_w=not transpose_w, **options)
        )
    if folded and not folds_blocks(schedule):
        raise UnsupportedError(f"{_OP}: expected a schedule for float8 with steps of one block of K, got {schedule}.")
    _check_schedule(schedule, transpose_w, None if sizes is None else sizes.shape[0], out_dtype.itemsize)
    epilogue = Epilogue(bias, scales=(row_scale, column_scale))
    out = ring_matmul(
        x,
        w,
        epilogue.padded(schedule.block_n),
        sizes=sizes,
        schedule=schedule,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        interpret=interpret,
        folded=folded,
    )
    return unpad(out, m, n)


def _check(
    x: Any, w: Any, row_scale: Any, column_scale: Any, transpose_w: bool, bias: Any, sizes: Any, out_dtype: Any
) -> None:
    given = {"x": x, "w": w, "row_scale": row_scale, "column_scale": column_scale, "bias": bias, "sizes": sizes}
    came = "got " + ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in given.items() if a is not None)
    lead = () if sizes is None else sizes.shape
    k_axis, n_axis = (-1, -2) if transpose_w else (-2, -1)
    if x.ndim != 2 or w.ndim != 2 + len(lead) or w.shape[:-2] != lead or x.shape[1] != w.shape[k_axis]:
        raise UnsupportedError(
            f"{_OP}: expected x (M, K) and w (K, N), or w (G, K, N) and sizes (G,), {came}, {transpose_w=}; pass"
            f" transpose_w={not transpose_w} if w is stored the other way."
        )
    columns = (*lead, w.shape[n_axis])
    if row_scale.shape != x.shape[:1] or column_scale.shape != columns or row_scale.dtype != jnp.float32:
        raise UnsupportedError(
            f"{_OP}: expected row_scale float32[{x.shape[0]}] and column_scale {list(columns)}, {came}."
        )
    if bias is not None and (sizes is not None or bias.shape != columns):
        raise UnsupportedError(f"{_OP}: expected a bias for each column, and none with sizes, {came}.")
    if sizes is not None and sizes.dtype != jnp.int32:
        raise UnsupportedError(f"{_OP}: expected sizes of int32, {came}; cast them.")
    check_result(_OP, out_dtype, came)


def _check_schedule(schedule: MatmulSchedule, transpose_w: bool, groups: int | None, out_itemsize: int) -> None:
    if schedule.k_step % SWIZZLE_BYTES or not takes_integers(schedule):
        raise UnsupportedError(
            f"{_OP}: expected a schedule with a k_step that is a multiple of {SWIZZLE_BYTES} and a number of columns"
            f" that wgmma takes for integers, 8, 24 or a multiple of 16, got {schedule}."
        )
    if not transpose_w and not transposes_weights(schedule):
        raise UnsupportedError(
            f"{_OP}: expected a schedule whose warpgroups, at most two, share tiles of at most 32 KiB of weights, a"
            f" multiple of 32 columns, got {schedule}; pass weights stored as (N, K) for others."
        )
    if groups is None:
        check_shared_memory(_OP, schedule, schedule.shared_bytes(1, out_itemsize))
        return
    if not holds_groups(schedule, out_itemsize):
        raise UnsupportedError(
            f"{_OP}: expected a schedule whose tiles have whole rows of 128 bytes of the result, got {schedule}."
        )
    check_shared_memory(_OP, schedule, bytes_in_groups(schedule, groups, 1, out_itemsize))
