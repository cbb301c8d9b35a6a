"""Matmul on a Hopper GPU: wgmma kernels whose tiles follow the shape and whose bits do not.

The tensor core adds 16 products at a time to a float32 accumulator. On Hopper that step gives the same bits at every
tile size, for either order of the operands, so one chain over K is a contract that every schedule honours
(benchmarks/NOTES.md; tests/gpu compares them).
"""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import WgmmaChunkContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.mosaic_gpu_ring import SWIZZLE_BYTES, ring_matmul
from pallas_kernels.schedule.hopper import SHARED_BYTES, MatmulSchedule
from pallas_kernels.schedule.hopper_matmul import candidates, matmul_schedule

_OP: Final = "pallas_kernels.matmul.mosaic_gpu.matmul"
_CAPABILITY: Final = "9.0"
_ALIGN: Final = 8  # elements in the 16 bytes to which the copy engine aligns rows
_WEIGHT_COLUMNS: Final = 16  # columns of the narrowest swizzled tile
_GRADIENT_OP: Final = "pallas_kernels.matmul.mosaic_gpu.weight_gradient"
_OPERANDS: Final = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_RESULTS: Final = (*_OPERANDS, jnp.dtype(jnp.float32))


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: WgmmaContract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    schedule: MatmulSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies rows by weights, or every matrix of a stack by its own weights in one launch.

    Aligned operands are used where they lie: K a multiple of 8, and N a multiple of 8 for weights stored as (N, K), of
    16 for (K, N). Others are copied once, padded with zeros, which adds exact zeros to the sums.

    Args:
        x: (M, K) or (..., M, K), bfloat16 or float16. Any sizes, 0 included.
        w: (K, N) or (..., K, N) of the same dtype, or (N, K), (..., N, K) with `transpose_w`; the leading dimensions
            are those of `x`, which may have none: its rows are multiplied by every entry's weights then.
        contract: Order of the sum over K.
        transpose_w: Whether `w` is stored as (N, K).
        bias: (N,) of the dtype of `x` or float32, added to the float32 sum before it is rounded.
        out_dtype: bfloat16, float16 or float32; that of `x` by default. The float32 value is rounded once.
        schedule: Tiles; chosen from the shape by default. No schedule moves a bit.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; the bits depend on K, the row, the weights and the bias alone, and are the same in a
    stack as in a single product.

    Source: fixed-tile matmul without split-K, as the project's first and third seed documents describe it.

    Example:
        The kernel needs a Hopper GPU; on a CPU its interpreter runs it.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
        >>> matmul(x, w, contract=WgmmaContract(), interpret=plgpu.InterpretGPUParams())[0, :2].tolist()
        [64.0, 64.0]
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, w, bias, contract, transpose_w, out_dtype)
    if not interpret:
        _check_device()
    (m, k), n, lead = x.shape[-2:], w.shape[-2 if transpose_w else -1], w.shape[:-2]
    if 0 in (*lead, m, k, n):
        # An empty sum is zero; the bias is added to it.
        value = jnp.zeros((n,), jnp.float32) if bias is None else bias.astype(jnp.float32)
        return jnp.broadcast_to(value.astype(out_dtype), (*lead, m, n))
    stack = math.prod(lead)
    k_axis, n_axis = (-1, -2) if transpose_w else (-2, -1)
    x = _pad(x, -1, _ALIGN)
    w = _pad(_pad(w, k_axis, _ALIGN), n_axis, _ALIGN if transpose_w else _WEIGHT_COLUMNS)
    x, w = _one_axis(x), _one_axis(w)
    sizes = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if schedule is None:
        schedule = matmul_schedule(m, k, n, stack=stack, transpose_w=transpose_w, **sizes)
    _check_schedule(schedule, **sizes)
    if bias is not None:
        bias = _pad(bias, 0, schedule.block_n)
    out = ring_matmul(x, w, bias, schedule=schedule, transpose_w=transpose_w, out_dtype=out_dtype, interpret=interpret)
    return (out if out.shape[-1] == n else out[..., :n]).reshape(*lead, m, n)


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: WgmmaChunkContract,
    accumulate: jax.Array | None = None,
    out_dtype: Any = None,
    schedule: MatmulSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Sums the outer products of rows: the gradient of `w` in `x @ w`, for every entry of a stack in one launch.

    Both operands are used where they lie if M is a multiple of 8 and K and N are multiples of 16. Others are copied
    once, padded with zeros, which adds exact zeros to the sums.

    Args:
        x: (M, K) or (..., M, K), bfloat16 or float16. Any sizes, 0 included.
        g: (M, N) or (..., M, N) of the same dtype, the cotangent of the product. One of the two may have no leading
            dimensions: it belongs to every entry then. Exchange the two for weights that are stored as (N, K).
        contract: Order of the sum over the rows.
        accumulate: (K, N) or (..., K, N) float32, a previous sum whose chain is continued.
        out_dtype: float32 by default; bfloat16 or float16 round the sum once.
        schedule: Tiles, without `swap`; chosen from the shape by default. No schedule moves a bit.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU. The interpreter adds
            `accumulate` behind the sum.

    Returns:
        (K, N) or (..., K, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows. An element's bits depend on its column
    of `x` and its column of `g` alone.

    Example:
        The kernel needs a Hopper GPU; on a CPU its interpreter runs it.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, g = jnp.ones((40, 64), jnp.bfloat16), jnp.ones((40, 64), jnp.bfloat16)
        >>> contract, interpret = WgmmaChunkContract(), plgpu.InterpretGPUParams()
        >>> weight_gradient(x, g, contract=contract, interpret=interpret)[0, :2].tolist()
        [40.0, 40.0]
    """
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    _check_gradient(x, g, accumulate, contract, out_dtype)
    if not interpret:
        _check_device()
    (m, k), n, lead = x.shape[-2:], g.shape[-1], x.shape[:-2] or g.shape[:-2]
    if 0 in (*lead, m, k, n):
        zero = jnp.zeros((), jnp.float32) if accumulate is None else accumulate
        return jnp.broadcast_to(zero.astype(out_dtype), (*lead, k, n))
    stack = math.prod(lead)
    x, g = (_one_axis(_pad(_pad(a, -2, _ALIGN), -1, _WEIGHT_COLUMNS)) for a in (x, g))
    sizes = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if schedule is None:
        ranked = candidates(k, m, n, stack=stack, transpose_w=False, **sizes).values()
        schedule = next(s for s in ranked if not s.swap)
    _check_schedule(schedule, **sizes)
    if schedule.swap:
        raise UnsupportedError(f"{_GRADIENT_OP}: expected a schedule without swap, got {schedule}; exchange x and g.")
    if accumulate is not None:
        accumulate = _pad(_one_axis(accumulate), -2, schedule.block_m * schedule.cluster_rows)
        accumulate = _pad(accumulate, -1, schedule.block_n * schedule.cluster_columns)
    out = ring_matmul(
        x,
        g,
        total=accumulate,
        schedule=schedule,
        transpose_w=False,
        transpose_x=True,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return (out if out.shape[-2:] == (k, n) else out[..., :k, :n]).reshape(*lead, k, n)


def _one_axis(a: jax.Array) -> jax.Array:
    """Returns a stack with one axis in front of its matrices; a matrix as it is."""
    return a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:]) if a.ndim > 2 else a


def _pad(a: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Returns `a` with zeros behind its end along `axis`, or `a` itself where it is a multiple already."""
    missing = -a.shape[axis] % multiple
    if not missing:
        return a
    return jnp.pad(a, [(0, missing if d == axis % a.ndim else 0) for d in range(a.ndim)])


def _check(x: Any, w: Any, bias: Any, contract: WgmmaContract, transpose_w: bool, out_dtype: Any) -> None:
    came = f"got x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, {transpose_w=}, out_dtype={out_dtype.name}"
    if not isinstance(contract, WgmmaContract):
        raise UnsupportedError(
            f"{_OP}: expected a WgmmaContract, the one order that this backend sums in, got {contract!r}; ask the"
            " backend of that contract instead."
        )
    if x.ndim < 2 or w.ndim < 2 or x.shape[:-2] not in ((), w.shape[:-2]):
        raise UnsupportedError(
            f"{_OP}: expected x (..., M, K) and w (..., K, N) with equal leading dimensions, or x (M, K), {came}; fold"
            " the leading dimensions of x into its rows where they share the weights."
        )
    if x.shape[-1] != w.shape[-1 if transpose_w else -2]:
        raise UnsupportedError(
            f"{_OP}: expected equal contracted lengths, {came}; pass transpose_w={not transpose_w} if w is stored the"
            " other way."
        )
    if x.dtype != w.dtype or x.dtype not in _OPERANDS:
        raise UnsupportedError(
            f"{_OP}: expected x and w of one dtype, bfloat16 or float16, {came}; cast them, or use another backend."
        )
    if out_dtype not in _RESULTS:
        raise UnsupportedError(f"{_OP}: expected out_dtype bfloat16, float16 or float32, {came}; cast the result.")
    if bias is None:
        return
    n = w.shape[-2 if transpose_w else -1]
    if bias.shape != (n,) or bias.dtype not in (x.dtype, jnp.dtype(jnp.float32)):
        raise UnsupportedError(
            f"{_OP}: expected a bias ({n},) of {x.dtype} or float32, got bias {bias.dtype}{list(bias.shape)}, {came};"
            " give one value for each column of the result."
        )


def _check_gradient(x: Any, g: Any, accumulate: Any, contract: WgmmaChunkContract, out_dtype: Any) -> None:
    came = f"got x {x.dtype}{list(x.shape)}, g {g.dtype}{list(g.shape)}, out_dtype={out_dtype.name}"
    if not isinstance(contract, WgmmaChunkContract):
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected a WgmmaChunkContract, the one order that this backend sums in, got"
            f" {contract!r}; ask the backend of that contract instead."
        )
    stacks = {a.shape[:-2] for a in (x, g)} - {()}
    if x.ndim < 2 or g.ndim < 2 or x.shape[-2] != g.shape[-2] or len(stacks) > 1:
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected x (..., M, K) and g (..., M, N) with as many rows and equal leading dimensions,"
            f" or none in one of them, {came}."
        )
    if x.dtype != g.dtype or x.dtype not in _OPERANDS:
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected x and g of one dtype, bfloat16 or float16, {came}; cast them, or use another"
            " backend."
        )
    if out_dtype not in _RESULTS:
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected out_dtype bfloat16, float16 or float32, {came}; cast the result."
        )
    shape = (*(x.shape[:-2] or g.shape[:-2]), x.shape[-1], g.shape[-1])
    if accumulate is not None and (accumulate.shape != shape or accumulate.dtype != jnp.float32):
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected accumulate float32{list(shape)}, got {accumulate.dtype}"
            f"{list(accumulate.shape)}, {came}; pass the float32 result of the previous call."
        )


def _check_device() -> None:
    """Refuses a GPU without wgmma in this process; a process without a GPU may lower for a Hopper one elsewhere."""
    if jax.default_backend() != "gpu":
        return
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability != _CAPABILITY:
        raise UnsupportedError(
            f"{_OP}: expected a Hopper GPU (compute capability {_CAPABILITY}), got {device.device_kind} with"
            f" {capability}; use the portable backend pallas_kernels.matmul.tiled."
        )


def _check_schedule(schedule: MatmulSchedule, itemsize: int, out_itemsize: int) -> None:
    if schedule.k_step * itemsize % SWIZZLE_BYTES:
        raise UnsupportedError(
            f"{_OP}: expected a schedule whose stages are whole rows of {SWIZZLE_BYTES} bytes, got {schedule}; make its"
            f" k_step a multiple of {SWIZZLE_BYTES // itemsize}."
        )
    needed = schedule.shared_bytes(itemsize, out_itemsize)
    if needed > SHARED_BYTES:
        raise UnsupportedError(
            f"{_OP}: expected a schedule that fits into {SHARED_BYTES} bytes of shared memory, got one that needs"
            f" {needed}: {schedule}; lower its stages or its tile."
        )
