"""Products and gradients of (stacked) matrices on a CPU."""

from functools import partial
from typing import Any

import jax

from pallas_kernels.contract import ChunkContract, MatmulContract
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.cpu import gradient, launch, stacked


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: MatmulContract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    out_dtype: Any = "float32",
) -> jax.Array:
    """Returns x @ w + bias, see `pallas_kernels.matmul.stacks.multiply`.

    Guarantee: row-invariant.
    """
    kernels = launch.matmul, stacked.matmul
    return stacks.multiply(kernels, x, w, bias=bias, out_dtype=out_dtype, contract=contract, transpose_w=transpose_w)


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: ChunkContract,
    accumulate: jax.Array | None = None,
    out_dtype: Any = "float32",
) -> jax.Array:
    """Returns the gradient of `w` in `x @ w`, see `pallas_kernels.matmul.stacks.weight_gradient`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    kernels = gradient.weight_gradient, gradient.stacked_weight_gradient
    along = partial(kernels[0], contract=contract), partial(kernels[1], contract=contract)
    return stacks.weight_gradient(along, x, g, accumulate=accumulate, out_dtype=out_dtype)
