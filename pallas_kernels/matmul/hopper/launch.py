"""Matmul on a Hopper GPU: wgmma kernels whose tiles depend on the shape, but not their bits.

The tensor core adds 16 products at a time to a float32 accumulator. On Hopper this step gives the same bits for every
tile size and either operand order, so every schedule honours the contract of one chain over K (benchmarks/NOTES.md;
tests/matmul compares them on a GPU).
"""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ElementwiseContract,
    SplitWgmmaContract,
    WgmmaChunkContract,
    WgmmaContract,
    honour,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.activations import activate
from pallas_kernels.matmul.hopper.chain_ring import chain_matmul
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.matmul.hopper.finish import finish
from pallas_kernels.matmul.hopper.operand import SWIZZLE_BYTES
from pallas_kernels.matmul.hopper.operands import (
    check_chain,
    check_contract,
    check_device,
    check_operands,
    check_result,
    check_shared_memory,
    one_axis,
    pad,
    pad_weights,
    unpad,
)
from pallas_kernels.matmul.hopper.ring import KSplits, ring_matmul
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule, chain_schedule
from pallas_kernels.matmul.schedule.hopper.fused_matmul import (
    SplitKSchedule,
    for_residual,
    gated_schedule,
    residual_schedule,
    rows_at_once,
    split_k_schedules,
    with_buffers,
)
from pallas_kernels.matmul.schedule.hopper.matmul import gradient_schedule, matmul_schedule
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_OP: Final = "pallas_kernels.matmul.hopper.launch.matmul"
_GATED_OP: Final = "pallas_kernels.matmul.hopper.launch.gated_matmul"
_ALIGN: Final = 8  # elements in the 16 bytes to which TMA aligns rows
_WEIGHT_COLUMNS: Final = 16  # columns of the narrowest swizzled tile of weights stored as (K, N)
_WHOLE_ROWS: Final = 64  # columns that are rows of 128 bytes: TMA copies narrower rows at a fraction of the speed
_MANY_ROWS: Final = 128  # of x, for which a copy of narrow weights takes less than what it saves
_GRADIENT_OP: Final = "pallas_kernels.matmul.hopper.launch.weight_gradient"
_OPERANDS: Final = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: WgmmaContract | SplitWgmmaContract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    activation: str | None = None,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    schedule: MatmulSchedule | SplitKSchedule | ChainSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies rows by weights, or every matrix of a stack by its own weights in one launch.

    The result is activation(x @ w + bias) + residual, each step in float32 and rounded once at the end. The product has
    the same bits as without the other terms.

    Aligned operands are read in place: K a multiple of 8, and N a multiple of 8 for weights stored as (N, K), of
    16 for (K, N). Others are copied once and zero-padded, which adds exact zeros to the sums.

    Args:
        x: (M, K) or (..., M, K), bfloat16 or float16. Any sizes, 0 included.
        w: (K, N) or (..., K, N) of the same dtype, or (N, K), (..., N, K) with `transpose_w`; the leading dimensions
            equal those of `x`, unless `x` is (M, K) and shared by all entries.
        contract: Order of the sum over K. Split-K contracts do not support stacks.
        transpose_w: Whether `w` is stored as (N, K).
        bias: (N,) of the dtype of `x` or float32, added to the float32 sum before it is rounded.
        activation: "gelu" (tanh form), "silu", "relu" or None (`pallas_kernels.matmul.hopper.activation`).
        functions: How the activation is computed.
        residual: (M, N) or (..., M, N) of `out_dtype`, added after the activation.
        out_dtype: bfloat16, float16 or float32; that of `x` by default. The float32 value is rounded once.
        schedule: Tiles; chosen from the shape by default. The bits do not depend on it. A `SplitKSchedule` for split-K
            contracts; a `ChainSchedule` for a single product without a residual.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; the bits depend on K, the row (with its residual), the weights and the bias alone, and are
    the same in a stack as in a single product.

    Source: fixed tiles without split-K, as in "Defeating Nondeterminism in LLM Inference"
    (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
        >>> matmul(x, w, contract=WgmmaContract(), interpret=plgpu.InterpretGPUParams())[0, :2].tolist()
        [64.0, 64.0]
    """
    honour(_OP, functions, PTX_FUNCTIONS)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, w, bias, residual, contract, transpose_w, out_dtype)
    if not interpret:
        check_device(_OP)
    (m, k), n, lead = x.shape[-2:], w.shape[-2 if transpose_w else -1], w.shape[:-2]
    if 0 in (*lead, m, k, n):
        # K == 0: the accumulator is zero; the epilogue still applies.
        value = jnp.zeros((n,), jnp.float32) if bias is None else bias.astype(jnp.float32)
        value = jnp.broadcast_to(activate(value, activation), (*lead, m, n))
        return (value if residual is None else value + residual.astype(jnp.float32)).astype(out_dtype)
    stack = math.prod(lead)
    columns = _ALIGN if transpose_w else _WEIGHT_COLUMNS
    copies = n % _WEIGHT_COLUMNS > 0 or (m >= _MANY_ROWS and residual is None)
    if copies and not transpose_w and not lead and n < _WHOLE_ROWS:
        columns = _WHOLE_ROWS
    x, w = one_axis(pad(x, -1, _ALIGN)), one_axis(pad_weights(w, transpose_w, _ALIGN, columns))
    if residual is not None:
        residual = one_axis(pad(residual, -1, w.shape[-2 if transpose_w else -1]))
    epilogue = Epilogue(bias, activation, residual)
    if isinstance(contract, SplitWgmmaContract) and contract.split_length(k) < k:
        common = {"transpose_w": transpose_w, "out_dtype": out_dtype, "interpret": interpret}
        if schedule is None:
            schedule = _split_schedule(m, w, epilogue, contract, k=k, itemsize=x.dtype.itemsize, **common)
        parts = schedule.parts if isinstance(schedule, SplitKSchedule) else 1
        rows = m if parts == 1 else rows_at_once(m, n, parts=parts)
        first = range(0, m, rows)
        blocks = [_split(x[i : i + rows], w, epilogue.of_rows(i, rows), contract, schedule, **common) for i in first]
        out = blocks[0]
        if len(blocks) > 1:
            out = jnp.concatenate([block[: min(rows, m - i)] for i, block in zip(first, blocks, strict=True)])
    else:
        if isinstance(schedule, SplitKSchedule):
            raise UnsupportedError(f"{_OP}: expected a MatmulSchedule where K is not cut, got {schedule}.")
        # Of (N, K) weights, bfloat16 alone has been compared on a GPU.
        served = not (lead or (transpose_w and x.dtype != jnp.bfloat16))
        if schedule is None and served and residual is None:
            schedule = chain_schedule(m, k, n, itemsize=x.dtype.itemsize, transpose_w=transpose_w)
        if isinstance(schedule, ChainSchedule):
            if lead or residual is not None:
                raise UnsupportedError(
                    f"{_OP}: expected a MatmulSchedule for a stack of products or a residual, got {schedule}."
                )
            check_chain(_OP, schedule, x.dtype.itemsize, transpose_w)
            common = {
                "schedule": schedule,
                "transpose_w": transpose_w,
                "out_dtype": out_dtype,
                "interpret": interpret,
            }
            w = w if transpose_w else pad(w, -1, schedule.columns)
            return unpad(chain_matmul(x, w, epilogue.padded(schedule.columns), **common), m, n)
        sizes = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
        same = not (lead or transpose_w) and x.dtype == out_dtype == jnp.bfloat16
        if schedule is None:
            choose = matmul_schedule if residual is None else residual_schedule
            more = {} if residual is None else {"same": same}
            schedule = choose(m, k, n, stack=stack, transpose_w=transpose_w, **sizes, **more)
        if residual is not None:
            schedule = for_residual(schedule, m, x.shape[-1], residual.shape[-1], same)
        _check_schedule(schedule, **sizes)
        out = ring_matmul(
            x,
            w,
            epilogue.padded(schedule.block_n),
            schedule=schedule,
            transpose_w=transpose_w,
            out_dtype=out_dtype,
            interpret=interpret,
        )
    return unpad(out, *lead, m, n)


def gated_matmul(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    contract: WgmmaContract,
    activation: str | None = "silu",
    functions: ElementwiseContract = PTX_FUNCTIONS,
    transpose_w: bool = False,
    out_dtype: Any = None,
    schedule: MatmulSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns activation(x @ w_gate) * (x @ w_up) in one launch, in float32 and rounded once.

    Args:
        x: (M, K), bfloat16 or float16. Any sizes, 0 included.
        w_gate: (K, N) of the same dtype, or (N, K) with `transpose_w`.
        w_up: The same.
        contract: Order of both sums over K.
        activation: As for `matmul`.
        functions: How the activation is computed.
        transpose_w: Whether the weights are stored as (N, K).
        out_dtype: bfloat16, float16 or float32; that of `x` by default.
        schedule: Tiles; chosen from the shape by default. Each weight takes half of a warpgroup's tile, so with `swap`
            it has 128 rows.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; both products have the bits that `matmul` gives them in float32.

    Example:
        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
        >>> y = gated_matmul(x, w, w, contract=WgmmaContract(), activation="relu", interpret=plgpu.InterpretGPUParams())
        >>> y[0, :2].tolist()
        [4096.0, 4096.0]
    """
    honour(_GATED_OP, functions, PTX_FUNCTIONS)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if isinstance(contract, SplitWgmmaContract) or x.ndim != 2 or w_gate.shape != w_up.shape:
        raise UnsupportedError(
            f"{_GATED_OP}: expected one matrix of rows, two weights of one shape and a WgmmaContract, got"
            f" x {x.dtype}{list(x.shape)}, w_gate {list(w_gate.shape)}, w_up {list(w_up.shape)}, {contract!r}; call it"
            " for each product of a stack, and `matmul` twice for another contract."
        )
    for w in (w_gate, w_up):
        _check(x, w, None, None, contract, transpose_w, out_dtype)
    if not interpret:
        check_device(_OP)
    (m, k), n = x.shape, w_gate.shape[-2 if transpose_w else -1]
    if 0 in (m, k, n):
        zero = jnp.zeros((m, n), jnp.float32)
        return (activate(zero, activation) * zero).astype(out_dtype)
    x = pad(x, -1, _ALIGN)
    gate, up = (pad_weights(w, transpose_w, _ALIGN, _ALIGN if transpose_w else _WEIGHT_COLUMNS) for w in (w_gate, w_up))
    sizes = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if schedule is None:
        schedule = gated_schedule(m, k, n, transpose_w=transpose_w, **sizes)
    _check_schedule(schedule, **sizes)
    if schedule.swap and schedule.tile_rows % 128:
        raise UnsupportedError(
            f"{_GATED_OP}: expected a schedule in which every warpgroup has 64 rows of both weights, got {schedule};"
            " use tile_rows=128 with swap."
        )
    out = ring_matmul(
        x,
        gate,
        Epilogue(activation=activation, up=up),
        schedule=schedule,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return unpad(out, m, n)


def _split_schedule(
    m: int,
    w: jax.Array,
    epilogue: Epilogue,
    contract: SplitWgmmaContract,
    *,
    k: int,
    itemsize: int,
    transpose_w: bool,
    out_dtype: Any,
    interpret: Any,
) -> SplitKSchedule:
    """Returns the schedule of a product under a split-K contract."""
    n, length = w.shape[-2 if transpose_w else -1], contract.split_length(k)
    sizes = {"itemsize": itemsize, "out_itemsize": out_dtype.itemsize, "residual": epilogue.residual is not None}
    return split_k_schedules(m, k, n, splits=-(-k // length), length=length, transpose_w=transpose_w, **sizes)[0]


def _split(
    x: jax.Array,
    w: jax.Array,
    epilogue: Epilogue,
    contract: SplitWgmmaContract,
    schedule: MatmulSchedule | SplitKSchedule | ChainSchedule,
    *,
    transpose_w: bool,
    out_dtype: Any,
    interpret: Any,
) -> jax.Array:
    """Multiplies under a split-K contract, in one or two kernels as the schedule says."""
    k = x.shape[1]
    length = contract.split_length(k)
    count = -(-k // length)  # a short K has fewer splits than the contract names
    sizes = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if not isinstance(schedule, SplitKSchedule) or length % schedule.tiles.k_step or count % schedule.parts:
        raise UnsupportedError(
            f"{_OP}: expected a SplitKSchedule whose k_step divides the {length} elements of a split and whose parts"
            f" divide the {count} splits, got {schedule}."
        )
    parts, tiles = schedule
    if epilogue.residual is not None and parts == 1:
        tiles = with_buffers(tiles)
    splits = KSplits(count, length, parts)
    common: dict[str, Any] = {"schedule": tiles, "transpose_w": transpose_w, "interpret": interpret, "splits": splits}
    if parts == 1:
        _check_schedule(tiles, **sizes)
        return ring_matmul(x, w, epilogue.padded(tiles.block_n), out_dtype=out_dtype, **common)
    _check_schedule(tiles, itemsize=x.dtype.itemsize, out_itemsize=4)
    partials = ring_matmul(x, w, Epilogue(), out_dtype=jnp.dtype(jnp.float32), **common)
    return finish(partials, epilogue, out_dtype=out_dtype, interpret=interpret)


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

    Both operands are read in place if M is a multiple of 8 and K and N are multiples of 16. Others are copied
    once and zero-padded, which adds exact zeros to the sums.

    Args:
        x: (M, K) or (..., M, K), bfloat16 or float16. Any sizes, 0 included.
        g: (M, N) or (..., M, N) of the same dtype, the cotangent of the product. One of the two may have no leading
            dimensions and is then shared by every entry. Exchange the two for weights that are stored as (N, K).
        contract: Order of the sum over the rows.
        accumulate: (K, N) or (..., K, N) float32, a previous sum, whose chain continues.
        out_dtype: float32 by default; bfloat16 or float16 round the sum once.
        schedule: Tiles, without `swap`; chosen from the shape by default. The bits do not depend on it.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU. The interpreter adds
            `accumulate` after the sum.

    Returns:
        (K, N) or (..., K, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows. An element's bits depend on its column
    of `x` and its column of `g` alone.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, g = jnp.ones((40, 64), jnp.bfloat16), jnp.ones((40, 64), jnp.bfloat16)
        >>> contract, interpret = WgmmaChunkContract(), plgpu.InterpretGPUParams()
        >>> weight_gradient(x, g, contract=contract, interpret=interpret)[0, :2].tolist()
        [40.0, 40.0]
    """
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    _check_gradient(x, g, accumulate, contract, out_dtype)
    if not interpret:
        check_device(_OP)
    (m, k), n, lead = x.shape[-2:], g.shape[-1], x.shape[:-2] or g.shape[:-2]
    if 0 in (*lead, m, k, n):
        zero = jnp.zeros((), jnp.float32) if accumulate is None else accumulate
        return jnp.broadcast_to(zero.astype(out_dtype), (*lead, k, n))
    stack = math.prod(lead)
    x, g = (one_axis(pad(pad(a, -2, _ALIGN), -1, _WEIGHT_COLUMNS)) for a in (x, g))
    sizes = {"itemsize": x.dtype.itemsize, "out_itemsize": out_dtype.itemsize}
    if schedule is None:
        schedule = gradient_schedule(m, k, n, stack=stack, **sizes)
    _check_schedule(schedule, **sizes)
    if schedule.swap:
        raise UnsupportedError(f"{_GRADIENT_OP}: expected a schedule without swap, got {schedule}; exchange x and g.")
    if accumulate is not None:
        accumulate = pad(one_axis(accumulate), -2, schedule.block_m)
        accumulate = pad(accumulate, -1, schedule.block_n)
    out = ring_matmul(
        x,
        g,
        Epilogue(),
        total=accumulate,
        schedule=schedule,
        transpose_w=False,
        transpose_x=True,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return unpad(out, *lead, k, n)


def _check(
    x: Any,
    w: Any,
    bias: Any,
    residual: Any,
    contract: WgmmaContract | SplitWgmmaContract,
    transpose_w: bool,
    out_dtype: Any,
) -> None:
    came = f"got x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, {transpose_w=}, out_dtype={out_dtype.name}"
    if not isinstance(contract, WgmmaContract | SplitWgmmaContract):
        raise UnsupportedError(
            f"{_OP}: expected a WgmmaContract or SplitWgmmaContract, the orders that this backend sums in, got"
            f" {contract!r}; ask the backend of that contract instead."
        )
    if isinstance(contract, SplitWgmmaContract) and w.ndim > 2:
        raise UnsupportedError(f"{_OP}: expected a single product for a contract with split K, {came}; map over them.")
    check_operands(_OP, x, w, bias, transpose_w, out_dtype, _OPERANDS)
    n = w.shape[-2 if transpose_w else -1]
    if residual is not None and (residual.shape != (*w.shape[:-2], x.shape[-2], n) or residual.dtype != out_dtype):
        raise UnsupportedError(
            f"{_OP}: expected a residual {[*w.shape[:-2], x.shape[-2], n]} of the result's dtype {out_dtype.name}, got"
            f" residual {residual.dtype}{list(residual.shape)}, {came}; cast it, or ask for its dtype with out_dtype."
        )


def _check_gradient(x: Any, g: Any, accumulate: Any, contract: WgmmaChunkContract, out_dtype: Any) -> None:
    came = f"got x {x.dtype}{list(x.shape)}, g {g.dtype}{list(g.shape)}, out_dtype={out_dtype.name}"
    check_contract(_GRADIENT_OP, contract, WgmmaChunkContract)
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
    check_result(_GRADIENT_OP, out_dtype, came)
    shape = (*(x.shape[:-2] or g.shape[:-2]), x.shape[-1], g.shape[-1])
    if accumulate is not None and (accumulate.shape != shape or accumulate.dtype != jnp.float32):
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected accumulate float32{list(shape)}, got {accumulate.dtype}"
            f"{list(accumulate.shape)}, {came}; pass the float32 result of the previous call."
        )


def _check_schedule(schedule: MatmulSchedule, itemsize: int, out_itemsize: int) -> None:
    if schedule.k_step * itemsize % SWIZZLE_BYTES:
        raise UnsupportedError(
            f"{_OP}: expected a schedule whose stages are whole rows of {SWIZZLE_BYTES} bytes, got {schedule}; make its"
            f" k_step a multiple of {SWIZZLE_BYTES // itemsize}."
        )
    check_shared_memory(_OP, schedule, schedule.shared_bytes(itemsize, out_itemsize))
