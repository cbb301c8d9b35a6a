"""Products and gradients of (stacked) matrices by plain products and sums, for any GPU.

They serve where no kernel does: on GPUs without tensor cores for bfloat16, and where the packages of the kernels are
missing. XLA's own dot cannot be used: XLA times its algorithms when it compiles a program, and takes the fastest.
"""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import RoundedChunkContract, RoundedMatmulContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul import stacks
from pallas_kernels.parts.xla.rounded_chain import STEP, rounded_sum

_OP: Final = "pallas_kernels.matmul.portable.matmul"
_GRADIENT_OP: Final = "pallas_kernels.matmul.portable.weight_gradient"
_BLOCKS: Final = f"blocks of a multiple of {STEP}"


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: RoundedMatmulContract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    out_dtype: Any = "float32",
) -> jax.Array:
    """Returns x @ w + bias, see `pallas_kernels.matmul.stacks.multiply`.

    Args:
        x: (M, K) or (..., M, K), float32, bfloat16, float16, or float64 if the contract's dtype is. Any sizes.
        w: (K, N) or (..., K, N), or (N, K), (..., N, K) with `transpose_w`; of any of these dtypes.
        contract: Order of the sum over K, and its dtype.
        transpose_w: Whether `w` is stored as (N, K).
        bias: (N,), added to the float32 sum.
        out_dtype: Dtype of the result.

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If the contract is of another kind, or its blocks are no multiples of 32.

    Guarantee: row-invariant.

    Example:
        >>> matmul(jnp.ones((3, 2)), jnp.ones((2, 1)), contract=RoundedMatmulContract()).tolist()
        [[2.0], [2.0], [2.0]]
    """
    if not isinstance(contract, RoundedMatmulContract) or contract.k_block % STEP:
        raise UnsupportedError(f"{_OP}: expected a RoundedMatmulContract with {_BLOCKS}, got {contract!r}.")

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        y = rounded_sum(
            _one_axis(x), _one_axis(w), dtype=contract.dtype, axes=(2, 2 if transpose_w else 1), block=contract.k_block
        )
        return y.reshape(*w.shape[:-2], *y.shape[1:])

    return stacks.multiply((product, product), x, w, bias=bias, out_dtype=out_dtype)


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: RoundedChunkContract,
    accumulate: jax.Array | None = None,
    out_dtype: Any = "float32",
) -> jax.Array:
    """Returns the gradient of `w` in `x @ w`, see `pallas_kernels.matmul.stacks.weight_gradient`.

    Args:
        x: (M, K) or (..., M, K), float32, bfloat16 or float16. Any sizes.
        g: (M, N) or (..., M, N), the cotangent of the product. One of the two may have no leading dimensions.
        contract: Order of the sum over the rows.
        accumulate: (K, N) or (..., K, N) float32, a previous sum, which continues.
        out_dtype: Dtype of the result.

    Returns:
        (K, N) or (..., K, N) of `out_dtype`.

    Raises:
        UnsupportedError: If the contract is of another kind, its chunks are no multiples of 32, or an operand is
            float64.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.

    Example:
        >>> x, g = jnp.ones((5, 2)), jnp.ones((5, 1))
        >>> weight_gradient(x, g, contract=RoundedChunkContract()).tolist()
        [[5.0], [5.0]]
    """
    if not isinstance(contract, RoundedChunkContract) or contract.rows % STEP:
        raise UnsupportedError(f"{_GRADIENT_OP}: expected a RoundedChunkContract with {_BLOCKS}, got {contract!r}.")
    if jnp.dtype("float64") in (x.dtype, g.dtype):
        raise UnsupportedError(
            f"{_GRADIENT_OP} adds in float32, got x {x.dtype} and g {g.dtype}; multiply x transposed by g with `matmul`"
            " under a RoundedMatmulContract of float64."
        )
    lead = x.shape[:-2] or g.shape[:-2]
    x, g = _one_axis(x), _one_axis(g)
    total = None if accumulate is None else accumulate.reshape(math.prod(lead), x.shape[2], g.shape[2])
    y = rounded_sum(x, g, dtype=jnp.float32, axes=(1, 1), block=contract.rows, total=total)
    return y.reshape(*lead, *y.shape[1:]).astype(out_dtype)


def _one_axis(a: jax.Array) -> jax.Array:
    """Returns matrices with one leading axis."""
    return a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:])
