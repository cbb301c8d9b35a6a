"""Products of float32 by bfloat16 on a Hopper GPU: the float32 operand as bfloat16 limbs, by the 16-bit kernels.

The gradients of a bfloat16 product with float32 results are such products. With limbs, the bfloat16 operand is read in
place and the tensor core runs at twice the rate of TF32.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import PartsChunkContract, PartsContract, WgmmaChunkContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper import launch
from pallas_kernels.matmul.hopper.operands import check_contract, pad

_OP: Final = "pallas_kernels.matmul.hopper.parts.matmul"
_GRADIENT_OP: Final = "pallas_kernels.matmul.hopper.parts.weight_gradient"
_STEP: Final = PartsChunkContract(2).rows
_UPPER: Final = np.int32(-65536)
_BOTH: Final = {"float32", "bfloat16"}


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: PartsContract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies rows by weights, one of them float32 and the other bfloat16, or every matrix of a stack.

    An infinity in the bfloat16 operand gives nan, because it is multiplied by zero limbs.

    Args:
        x: (M, K) or (..., M, K). Any sizes, 0 included.
        w: (K, N) or (..., K, N); (N, K) or (..., N, K) with `transpose_w`.
        contract: Limbs, and the order of the sum.
        transpose_w: Whether `w` is stored as (N, K).
        bias: (N,), added to the float32 sum.
        out_dtype: float32 by default; the sum is rounded once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; the bits depend on K, the row, the weights and the bias alone.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, w = jnp.full((3, 64), 1 / 3), jnp.ones((64, 64), jnp.bfloat16)
        >>> matmul(x, w, contract=PartsContract(3), interpret=plgpu.InterpretGPUParams())[0, :2].tolist()
        [21.33333396911621, 21.33333396911621]
    """
    check_contract(_OP, contract, PartsContract)
    _check(_OP, x, w)
    options: dict[str, Any] = {"transpose_w": transpose_w, "interpret": interpret}
    if x.dtype == jnp.float32:
        # The limbs of the rows are rows of one product, in the order of `weight_gradient`, so that XLA computes them
        # once for the gradients of both operands.
        rows = _STEP if x.shape[-2] % _STEP == 0 else x.shape[-2]
        total = _sum_of_rows(_interleaved(x, contract.parts, rows), w, contract.parts, rows, **options)
    else:
        total = _sum_of([_chain(x, part, **options) for part in reversed(_parts(w, contract.parts))])
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return total.astype(jnp.float32 if out_dtype is None else out_dtype)


def matmul_of_parts(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: PartsContract,
    transpose_w: bool = False,
    out_dtype: Any = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiplies rows already split into limbs by weights: the second half of `matmul`.

    Args:
        x: (parts * M, K) or (..., parts * M, K) bfloat16, M a multiple of 16: for each 16 rows the last limb, then the
            one before it, and so on.
        w: (K, N) or (..., K, N) bfloat16; (N, K) or (..., N, K) with `transpose_w`.
        contract: Limbs, and the order of the sum.
        transpose_w: Whether `w` is stored as (N, K).
        out_dtype: float32 by default; the sum is rounded once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract.

    Guarantee: row-invariant, with the bits of `matmul` of the summed limbs.
    """
    check_contract(_OP, contract, PartsContract)
    total = _sum_of_rows(x, w, contract.parts, _STEP, transpose_w=transpose_w, interpret=interpret)
    return total.astype(jnp.float32 if out_dtype is None else out_dtype)


def _sum_of_rows(x: jax.Array, w: jax.Array, parts: int, rows: int, **options: Any) -> jax.Array:
    """Multiplies rows stored as interleaved limbs, and adds the products of the limbs."""
    return add_limbs(_chain(x, w, **options), parts, rows)


def add_limbs(y: jax.Array, parts: int, rows: int) -> jax.Array:
    """Adds the chains of interleaved limbs, `rows` rows of each in turn, from the last limb to the first."""
    m = y.shape[-2] // parts
    y = y.reshape(*y.shape[:-2], m // max(1, rows), parts, rows, y.shape[-1])
    return _sum_of([y[..., i, :, :].reshape(*y.shape[:-4], m, y.shape[-1]) for i in range(parts)])


def _chain(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    return launch.matmul(a, b, contract=WgmmaContract(), out_dtype=jnp.float32, **options)


def _sum_of(chains: Sequence[jax.Array]) -> jax.Array:
    total = chains[0]
    for chain in chains[1:]:
        total = total + chain
    return total


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: PartsChunkContract,
    accumulate: jax.Array | None = None,
    out_dtype: Any = None,
    interpret: Any = False,
) -> jax.Array:
    """Sums the outer products of rows, one operand float32 and the other bfloat16: the gradient of weights.

    The rows of both are copied once: 16 rows of one operand are paired with each limb of 16 rows of the other.

    Args:
        x: (M, K) or (..., M, K). Any sizes, 0 included.
        g: (M, N) or (..., M, N), the cotangent of the product.
        contract: Limbs, and the order of the sum over the rows.
        accumulate: (K, N) or (..., K, N) float32, a previous sum, whose chain continues.
        out_dtype: float32 by default; the sum is rounded once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (K, N) or (..., K, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows. An element's bits depend on its column
    of `x` and its column of `g` alone.

    Example:
        The kernel needs a Hopper GPU; on a CPU it runs in the interpreter.

        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> x, g = jnp.ones((40, 64), jnp.bfloat16), jnp.full((40, 64), 0.1)
        >>> contract, interpret = PartsChunkContract(2), plgpu.InterpretGPUParams()
        >>> round(float(weight_gradient(x, g, contract=contract, interpret=interpret)[0, 0]), 4)
        4.0
    """
    check_contract(_GRADIENT_OP, contract, PartsChunkContract)
    _check(_GRADIENT_OP, x, g)

    left, right = (_interleaved(pad(a, -2, contract.rows), contract.parts, contract.rows) for a in (x, g))
    return weight_gradient_of_parts(
        *(left, right),
        contract=contract,
        paired=True,
        accumulate=accumulate,
        out_dtype=out_dtype,
        interpret=interpret,
    )


def weight_gradient_of_parts(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: PartsChunkContract,
    paired: bool = False,
    transpose: bool = False,
    accumulate: jax.Array | None = None,
    out_dtype: Any = None,
    interpret: Any = False,
) -> jax.Array:
    """Sums the outer products of rows already split into limbs: the second half of `weight_gradient`.

    Args:
        x: (parts * M, K) or (..., parts * M, K) bfloat16, as `matmul_of_parts` takes it.
        g: (M, N) or (..., M, N) bfloat16; (parts * M, N) if `paired`.
        contract: Limbs, and the order of the sum over the rows.
        paired: Whether each 16 rows of `g` are already repeated for each limb.
        transpose: Whether the result is (N, K).
        accumulate: Of the shape of the result, float32, a previous sum, whose chain continues.
        out_dtype: float32 by default; the sum is rounded once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU.

    Returns:
        (K, N) or (..., K, N) of `out_dtype`; (N, K) with `transpose`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract.

    Guarantee: split-invariant, with the bits of `weight_gradient` of the summed limbs.
    """
    check_contract(_GRADIENT_OP, contract, PartsChunkContract)
    left, right = x, g if paired else _interleaved(g, contract.parts, contract.rows)
    if transpose:
        left, right = right, left
    return launch.weight_gradient(
        left,
        right,
        contract=WgmmaChunkContract(),
        accumulate=accumulate,
        out_dtype=out_dtype,
        interpret=interpret,
    )


def _interleaved(x: jax.Array, parts: int, rows: int) -> jax.Array:
    """Returns (..., parts * M, n): for each `rows` rows the last limb, then the one before it, and so on.

    Other dtypes than float32 are repeated once per limb.
    """
    m, n = x.shape[-2:]
    blocks = x.reshape(*x.shape[:-2], m // max(1, rows), 1, rows, n)
    blocks = jnp.broadcast_to(blocks, (*blocks.shape[:-3], parts, rows, n))
    if x.dtype == jnp.float32:
        # One element-wise program, which rereads repeated rows from the cache: a concatenation takes twice the time.
        # Each copy is XORed with its number and back, or XLA would hoist the computation common to all copies into a
        # separate pass.
        number = lax.broadcasted_iota(jnp.int32, blocks.shape, blocks.ndim - 3)
        numbered = lax.bitcast_convert_type(blocks, jnp.int32) ^ number
        *others, found = _parts(lax.bitcast_convert_type(numbered ^ number, jnp.float32), parts)[::-1]
        for i, part in enumerate(others):
            found = jnp.where(number == i, part, found)
        blocks = found
    return blocks.reshape(*x.shape[:-2], parts * m, n)


def _parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns the bfloat16 limbs of float32 numbers, the largest first."""
    parts, rest = [], x
    for _ in range(count - 1):
        # Masks the upper bits: XLA may drop a round-trip conversion (`xla_allow_excess_precision`).
        upper = lax.bitcast_convert_type(lax.bitcast_convert_type(rest, jnp.int32) & _UPPER, jnp.float32)
        finite = jnp.abs(rest) < jnp.inf
        parts.append(jnp.where(finite, upper, rest).astype(jnp.bfloat16))
        rest = jnp.where(finite, rest - upper, 0.0)
    return [*parts, rest.astype(jnp.bfloat16)]


def _check(op: str, a: jax.Array, b: jax.Array) -> None:
    if {a.dtype.name, b.dtype.name} != _BOTH:
        raise UnsupportedError(
            f"{op}: expected one float32 and one bfloat16 operand, got {a.dtype.name} and {b.dtype.name}; operands of"
            " one dtype have kernels of their own."
        )
