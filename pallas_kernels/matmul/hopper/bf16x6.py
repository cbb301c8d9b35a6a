"""Matmul of float32 operands with float32 accuracy on a Hopper GPU, on the tensor cores.

Each operand is the exact sum of three bfloat16 limbs; six of the nine limb products are summed, which leaves an error
of at most 2**-24 of each product, the same as rounding it to float32. Element-wise code before the kernel splits the
activations; the kernel splits the weights, which are therefore read once, as float32.
"""

import math
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import SplitChunkContract, SplitContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.hopper.bf16x6_ring import BLOCK, split, split_ring_matmul
from pallas_kernels.matmul.hopper.operands import (
    check_contract,
    check_device,
    check_operands,
    check_shared_memory,
    empty,
    one_axis,
    pad,
    unpad,
)
from pallas_kernels.matmul.schedule.hopper.bf16x6 import SplitSchedule, split_schedule
from pallas_kernels.parts.xla.tiles import fold_row_chunks

_OP: Final = "pallas_kernels.matmul.hopper.bf16x6.matmul"
_GRADIENT_OP: Final = "pallas_kernels.matmul.hopper.bf16x6.weight_gradient"
_CONTIGUOUS: Final = 32  # elements of the swizzled rows of the weights
_ROWS: Final = 8


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: SplitContract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    schedule: SplitSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies float32 rows by float32 weights, or every matrix of a stack by its own weights, at float32 accuracy.

    Weights are read in place if their contiguous dimension is a multiple of 32 and the other a multiple of 8; others
    are copied once and zero-padded, which adds exact zeros to the sums.

    Infinities and nan propagate as in float32 arithmetic. Below 2**-110 an operand has an absolute error of 2**-134
    (the smallest unit of the bfloat16 limbs).

    Args:
        x: (M, K) or (..., M, K), float32. Any sizes, 0 included.
        w: (K, N) or (..., K, N) float32, or (N, K), (..., N, K) with `transpose_w`; the leading dimensions equal those
            of `x`, unless `x` is (M, K) and shared by all entries.
        contract: Order of the sum over K, `pallas_kernels.contract.split_contract(K)`.
        transpose_w: Whether `w` is stored as (N, K).
        bias: (N,) of any floating dtype, added to the float32 sum.
        out_dtype: bfloat16, float16 or float32 (the default). The float32 value is rounded once.
        schedule: Tiles; chosen from the shape by default. The bits do not depend on it.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; the bits depend on K, the row, the weights and the bias alone, and are the same in a
    stack as in a single product.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w = jnp.full((3, 64), 1 / 3), jnp.ones((64, 64))
        >>> matmul(x, w, contract=SplitContract(64), interpret=plgpu.InterpretGPUParams())[0, :2].tolist()
        [21.33333396911621, 21.33333396911621]
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    bias = None if bias is None else bias.astype(jnp.float32)
    check_contract(_OP, contract, SplitContract)
    check_operands(_OP, x, w, bias, transpose_w, out_dtype, (jnp.dtype(jnp.float32),))
    if not interpret:
        check_device(_OP)
    (m, k), n, lead = x.shape[-2:], w.shape[-2 if transpose_w else -1], w.shape[:-2]
    if 0 in (*lead, m, k, n):
        return empty((*lead, m, n), bias, out_dtype)
    w = pad(pad(w, -1, _CONTIGUOUS), -2, _ROWS)
    x = _parts(pad(x, -2, _ROWS) if m > _ROWS else x)
    x, w = one_axis(x), one_axis(w)
    if schedule is None:
        schedule = split_schedule(m, k, n, contract.splits(k), stack=math.prod(lead))
    check_shared_memory(_OP, schedule, schedule.shared_bytes)
    sums = split_ring_matmul(x, w, contract=contract, schedule=schedule, transpose_w=transpose_w, interpret=interpret)
    total = sums[0]
    for i in range(1, sums.shape[0]):
        total += sums[i]
    total = unpad(total, *lead, m, n)
    if bias is not None:
        total += bias
    return total.astype(out_dtype)


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: SplitChunkContract,
    accumulate: jax.Array | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Sums the outer products of rows at float32 accuracy: the gradient of `w` in `x @ w`.

    Args:
        x: (M, K) float32. Any sizes, 0 included.
        g: (M, N) float32, the cotangent of the product.
        contract: Order of the sum over the rows.
        accumulate: (K, N) float32, a previous sum, whose chain continues.
        interpret: As in `matmul`.

    Returns:
        (K, N) float32.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows; an element depends on its columns of `x`
    and `g` alone, regardless of the others.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, g = jnp.ones((64, 8)), jnp.ones((64, 32))
        >>> interpret = plgpu.InterpretGPUParams()
        >>> weight_gradient(x, g, contract=SplitChunkContract(64), interpret=interpret)[0, :2].tolist()
        [64.0, 64.0]
    """
    check_contract(_GRADIENT_OP, contract, SplitChunkContract)
    if x.ndim != 2 or g.ndim != 2 or x.shape[0] != g.shape[0]:
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected x (M, K) and g (M, N), got x {list(x.shape)}, g {list(g.shape)}; map over the"
            " entries of a stack."
        )
    shape = (x.shape[1], g.shape[1])
    total = jnp.zeros(shape, jnp.float32) if accumulate is None else accumulate
    if total.shape != shape or total.dtype != jnp.float32:
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected accumulate float32{list(shape)}, got {total.dtype}{list(total.shape)}; pass the"
            " result of another call."
        )
    if 0 in shape:
        return total

    def outer(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(a.T, b, contract=contract.split, interpret=interpret)

    return fold_row_chunks(outer, [x, g], contract.rows, total)


def weight_gradients(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: SplitChunkContract,
    accumulate: jax.Array | None = None,
    out_dtype: Any = "float32",
) -> jax.Array:
    """Returns `weight_gradient`, or the gradients of every entry of a stack, rounded once.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    single = partial(weight_gradient, contract=contract)

    def stack(x: jax.Array, g: jax.Array) -> jax.Array:
        return lax.map(lambda entry: single(*entry), (x, g))

    return stacks.weight_gradient((single, stack), x, g, accumulate=accumulate, out_dtype=out_dtype)


def _parts(x: jax.Array) -> jax.Array:
    """Returns (..., M, 3 K'): for each block of K the high, middle and low limbs (see `split_ring_matmul`)."""
    x = pad(x, -1, BLOCK)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return jnp.stack(split(blocks, _round), axis=-2).reshape(*x.shape[:-1], 3 * x.shape[-1])


def _round(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA may drop a round-trip conversion (`xla_allow_excess_precision`), but not this.
    rounded = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
    return rounded, rounded.astype(jnp.bfloat16)
