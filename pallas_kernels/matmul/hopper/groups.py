"""Products of rows in groups (experts) on a Hopper GPU, each row with the weights of its group, in one launch.

The kernel is the matmul's pipeline, with tile positions computed from the group sizes on the GPU, so every row has the
bits of `matmul`.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import WgmmaChunkContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.empty_groups import empty_sums
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.matmul.hopper.group_tiles import MOST_GROUPS
from pallas_kernels.matmul.hopper.groups_gradient import sum_groups
from pallas_kernels.matmul.hopper.operands import (
    check_contract,
    check_device,
    check_result,
    check_shared_memory,
    pad,
    pad_weights,
    unpad,
)
from pallas_kernels.matmul.hopper.ring import ring_matmul
from pallas_kernels.matmul.schedule.hopper.group_matmul import (
    bytes_in_groups,
    group_schedule,
    holds_groups,
    sums_schedule,
)
from pallas_kernels.parts.no_row import NO_ROW
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_OP: Final = "pallas_kernels.matmul.hopper.groups.group_matmul"
_SUMS_OP: Final = "pallas_kernels.matmul.hopper.groups.group_weight_gradient"
_OPERANDS: Final = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_ALIGN: Final = 8
_WEIGHT_COLUMNS: Final = 16

Pick = Callable[[jax.Array, jax.Array], jax.Array]


def take_rows(x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the rows of x (M, C) at indices (M',), zeros at -1."""
    return jnp.take(x, jnp.where(places < 0, x.shape[0], places), axis=0, mode="fill", fill_value=0)


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
    zero_unused: bool = True,
    schedule: MatmulSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies each row by the weights of its group.

    Aligned operands are read in place: K a multiple of 8, and N a multiple of 8 for weights stored as (N, K), of
    16 for (K, N). Others are copied once and zero-padded, which adds exact zeros to the sums.

    Args:
        x: (M, K), bfloat16 or float16, sorted by group.
        w: (G, K, N) of the same dtype, or (G, N, K) with `transpose_w`; at most 1024 groups.
        sizes: (G,) int32, the number of rows of each group.
        contract: Order of the sum over K.
        transpose_w: Whether the weights of a group are stored as (N, K).
        out_dtype: bfloat16, float16 or float32; that of `x` by default. The float32 sum is rounded once.
        zero_unused: Whether rows after the last group are written.
        schedule: Tiles; chosen from M, G, K and N by default. The bits do not depend on it.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) of `out_dtype`. Rows after the last group are zeros, or undefined without `zero_unused`. If sizes are
        negative or add up to more than M, the whole result is nan.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; a row has the bits that `pallas_kernels.matmul.hopper.launch.matmul` gives it with
    the weights of its group, wherever it stands and however many rows its group and the others have.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

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
        return empty_sums(sizes, m, (m, n), out_dtype)
    x = pad(x, -1, _ALIGN)
    w = pad_weights(w, transpose_w, _ALIGN, _ALIGN if transpose_w else _WEIGHT_COLUMNS)
    bytes_of = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if schedule is None:
        schedule = group_schedule(m, groups, k, n, transpose_w=transpose_w, **bytes_of)
    if not holds_groups(schedule, out_dtype.itemsize):
        raise UnsupportedError(
            f"{_OP}: expected a schedule whose tiles have whole rows of 128 bytes of the result, got {schedule}."
        )
    check_shared_memory(_OP, schedule, bytes_in_groups(schedule, groups, **bytes_of))
    out = ring_matmul(
        x,
        w,
        Epilogue(),
        sizes=sizes,
        fills=zero_unused,
        schedule=schedule,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return unpad(out, m, n)


def _serves_sums(x: Any, g: Any, sizes: Any, **_: Any) -> bool:
    return sizes.shape[0] <= MOST_GROUPS and x.dtype == g.dtype and x.dtype in _OPERANDS


@served_if(_serves_sums, f"x and g of one dtype, bfloat16 or float16, and at most {MOST_GROUPS} groups")
def group_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    sizes: jax.Array,
    *,
    contract: WgmmaChunkContract,
    out_dtype: Any = None,
    schedule: MatmulSchedule | None = None,
    pick: Pick = take_rows,
    interpret: Any = False,
) -> jax.Array:
    """Sums the outer products of the rows of each group: the gradient of `w` in `group_matmul`.

    Rows are copied once, so that every group starts at a stage of the kernel, zero-padded up to the next group.

    Args:
        x: (M, K), bfloat16 or float16, sorted by group.
        g: (M, N) of the same dtype, the cotangent of the product. Exchange the two for weights stored as (N, K).
        sizes: (G,) int32, the rows of each group; at most 1024 groups.
        contract: Order of the sum over the rows of a group.
        out_dtype: float32 by default; bfloat16 or float16 round the sum once.
        schedule: Tiles, without `swap` or split "tiles"; chosen from the shape by default. The bits do not depend on
            it.
        pick: Gathers the rows of an array (M, C) at indices (M',) int32, zeros at -1.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (G, K, N) of `out_dtype`; zeros for a group without rows. If sizes are negative or add up to more than M,
        the whole result is nan.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: a group's sum depends on its own rows alone, in their order, and has the bits that
    `pallas_kernels.matmul.hopper.launch.weight_gradient` gives them.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, sizes = jnp.ones((9, 64), jnp.bfloat16), jnp.array([2, 7], jnp.int32)
        >>> contract, interpret = WgmmaChunkContract(), plgpu.InterpretGPUParams()
        >>> group_weight_gradient(x, x, sizes, contract=contract, interpret=interpret)[:, 0, 0].tolist()
        [2.0, 7.0]
    """
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    _check_sums(x, g, sizes, contract, out_dtype)
    if not interpret:
        check_device(_SUMS_OP)
    (m, k), n, groups = x.shape, g.shape[1], sizes.shape[0]
    if 0 in (m, k, n, groups):
        return empty_sums(sizes, m, (groups, k, n), out_dtype)
    bytes_of = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if schedule is None:
        schedule = sums_schedule(m, groups, k, n, **bytes_of)
    if schedule.swap or schedule.split != "rows":
        raise UnsupportedError(f"{_SUMS_OP}: expected a schedule without swap or tiles in turn, got {schedule}.")
    check_shared_memory(_SUMS_OP, schedule, bytes_in_groups(schedule, groups, **bytes_of))
    source = _moved_apart(sizes, m, schedule.k_step)
    x, g = (pick(pad(a, -1, _WEIGHT_COLUMNS), source) for a in (x, g))
    out = sum_groups(x, g, sizes, rows=m, schedule=schedule, out_dtype=out_dtype, interpret=interpret)
    return unpad(out, groups, k, n)


def _moved_apart(sizes: jax.Array, m: int, step: int) -> jax.Array:
    """Returns the row (-1 for padding) of each position, with groups starting at multiples of `step`."""
    ends = jnp.minimum(lax.cumsum(jnp.clip(sizes, 0, m)), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    totals = lax.cumsum((ends - starts + step - 1) // step)
    places = jnp.arange(min(m, m // step + sizes.shape[0]) * step, dtype=jnp.int32)
    group = jnp.minimum(
        jnp.searchsorted(totals, places // step, side="right", method="scan_unrolled"), sizes.shape[0] - 1
    )
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), totals[:-1]])
    row = starts[group] + places - before[group] * step
    return jnp.where(row < ends[group], row, NO_ROW)


def _check_sums(x: Any, g: Any, sizes: Any, contract: Any, out_dtype: Any) -> None:
    came = (
        f"got x {x.dtype}{list(x.shape)}, g {g.dtype}{list(g.shape)}, sizes {sizes.dtype}{list(sizes.shape)},"
        f" out_dtype={out_dtype.name}"
    )
    check_contract(_SUMS_OP, contract, WgmmaChunkContract)
    if x.ndim != 2 or g.ndim != 2 or x.shape[0] != g.shape[0]:
        raise UnsupportedError(f"{_SUMS_OP}: expected x (M, K) and g (M, N) with as many rows, {came}.")
    if sizes.ndim != 1 or sizes.dtype != jnp.int32:
        raise UnsupportedError(f"{_SUMS_OP}: expected sizes int32[G], {came}; cast them.")
    check_result(_SUMS_OP, out_dtype, came)


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
