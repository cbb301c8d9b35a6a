"""Products of rows in groups (experts) on a Hopper GPU, each row with the weights of its group, in one launch.

The kernel is the matmul's ring; only its tiles stand where the sizes of the groups say, which it reads on the GPU. So
every row has the bits that `matmul` gives it.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.matmul.hopper.epilogue import Epilogue
from pallas_kernels.ops.matmul.hopper.operands import (
    check_contract,
    check_device,
    check_result,
    check_shared_memory,
    pad,
)
from pallas_kernels.ops.matmul.hopper.ring import ring_matmul
from pallas_kernels.parts.hopper.groups import MOST_GROUPS
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.hopper.group_matmul import group_schedule, holds_groups
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_OP: Final = "pallas_kernels.ops.matmul.hopper.groups.group_matmul"
_OPERANDS: Final = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_ALIGN: Final = 8
_WEIGHT_COLUMNS: Final = 16


def _serves(x: Any, w: Any, *_: Any, **__: Any) -> bool:
    return w.shape[0] <= MOST_GROUPS and x.dtype == w.dtype and x.dtype in _OPERANDS


@served_if(_serves, f"x and w of one dtype, bfloat16 or float16, and at most {MOST_GROUPS} groups")
def group_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    contract: WgmmaContract,
    transpose_w: bool = False,
    out_dtype: Any = None,
    schedule: MatmulSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies each row by the weights of its group.

    Aligned operands are used where they lie: K a multiple of 8, and N a multiple of 8 for weights stored as (N, K), of
    16 for (K, N). Others are copied once, padded with zeros, which adds exact zeros to the sums.

    Args:
        x: (M, K), bfloat16 or float16, sorted by group.
        w: (G, K, N) of the same dtype, or (G, N, K) with `transpose_w`; at most 1022 groups.
        sizes: (G,) int32, the rows of each group.
        contract: Order of the sum over K.
        transpose_w: Whether the weights of a group are stored as (N, K).
        out_dtype: bfloat16, float16 or float32; that of `x` by default. The float32 sum is rounded once.
        schedule: Tiles; chosen from M, G, K and N by default. No schedule moves a bit.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) of `out_dtype`. Rows behind the last group are zeros. If sizes are negative or add up to more than M,
        everything is nan.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; a row has the bits that `pallas_kernels.ops.matmul.hopper.launch.matmul` gives it with
    the weights of its group, wherever it stands and however many rows its group and the others have.

    Example:
        The kernel needs a Hopper GPU; on a CPU its interpreter runs it.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
        >>> sizes, interpret = jnp.array([0, 2], jnp.int32), plgpu.InterpretGPUParams()
        >>> group_matmul(x, w, sizes, contract=WgmmaContract(), interpret=interpret)[:, 0].tolist()
        [64.0, 64.0, 0.0]
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, w, sizes, contract, transpose_w, out_dtype)
    if not interpret:
        check_device(_OP)
    (m, k), groups, n = x.shape, w.shape[0], w.shape[-2 if transpose_w else -1]
    if 0 in (m, k, groups, n):
        fit = jnp.all(sizes >= 0) & (jnp.sum(jnp.clip(sizes, 0, m + 1)) <= m)
        return jnp.broadcast_to(jnp.where(fit, 0, jnp.nan).astype(out_dtype), (m, n))
    x = pad(x, -1, _ALIGN)
    k_axis, n_axis = (-1, -2) if transpose_w else (-2, -1)
    w = pad(pad(w, k_axis, _ALIGN), n_axis, _ALIGN if transpose_w else _WEIGHT_COLUMNS)
    bytes_of = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if schedule is None:
        schedule = group_schedule(m, groups, k, n, transpose_w=transpose_w, **bytes_of)
    if not holds_groups(schedule, out_dtype.itemsize):
        raise UnsupportedError(
            f"{_OP}: expected a schedule whose tiles have whole rows of 128 bytes of the result, got {schedule}."
        )
    check_shared_memory(_OP, schedule, schedule.shared_bytes(**bytes_of))
    out = ring_matmul(
        x,
        w,
        Epilogue(),
        sizes=sizes,
        schedule=schedule,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return out if out.shape[-1] == n else out[..., :n]


def _check(x: Any, w: Any, sizes: Any, contract: Any, transpose_w: bool, out_dtype: Any) -> None:
    came = (
        f"got x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, sizes {sizes.dtype}{list(sizes.shape)},"
        f" {transpose_w=}, out_dtype={out_dtype.name}"
    )
    check_contract(_OP, contract, WgmmaContract)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[-1 if transpose_w else -2]:
        raise UnsupportedError(
            f"{_OP}: expected x (M, K) and w (G, K, N), or (G, N, K) with transpose_w, {came}; fold leading dimensions"
            " into the rows."
        )
    if sizes.shape != w.shape[:1] or sizes.dtype != jnp.int32:
        raise UnsupportedError(f"{_OP}: expected sizes int32[{w.shape[0]}], one for each group, {came}; cast them.")
    check_result(_OP, out_dtype, came)
