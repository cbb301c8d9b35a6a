"""The softmax family on rows, and its gradients, on NVIDIA GPUs from Ampere on, by Triton kernels.

Sums have the order of `portable`; exp and log are sequences of instructions of their own (`PTX_FUNCTIONS`), where the
portable programs have XLA's. The gradient of softmax, which has neither, has the bits of `portable`.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import PTX_FUNCTIONS, ElementwiseContract, RowContract, honour, row_contract
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.jax_triton.rows import sizes, warps
from pallas_kernels.parts.served import served_if
from pallas_kernels.softmax.jax_triton.kernels import (
    log_softmax_gradient_kernel,
    log_softmax_kernel,
    logsumexp_gradient_kernel,
    logsumexp_kernel,
    softmax_gradient_kernel,
    softmax_kernel,
)
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]
NEEDS: Final = "rows of up to 131072 columns of float32, bfloat16 or float16"
_MOST_COLUMNS: Final = 131_072


def _served(x: jax.Array, *_: Any, **__: Any) -> bool:
    return x.shape[1] <= _MOST_COLUMNS and x.dtype.name in ("float32", "bfloat16", "float16")


@served_if(_served, NEEDS)
def softmax(
    x: jax.Array, *, contract: RowContract, target: Target, functions: ElementwiseContract = PTX_FUNCTIONS
) -> jax.Array:
    """Returns the softmax of rows, see `portable.softmax`.

    Guarantee: row-invariant.
    """
    honour("softmax", contract, row_contract())
    honour("softmax", functions, PTX_FUNCTIONS)
    return _run(softmax_kernel, [x], [_like(x)], target)[0]


@served_if(lambda y, *_, **__: _served(y), NEEDS)
def softmax_gradient(y: jax.Array, g: jax.Array, *, contract: RowContract, target: Target) -> jax.Array:
    """Bit-identical to `portable.softmax_gradient`.

    Guarantee: row-invariant.
    """
    honour("softmax_gradient", contract, row_contract())
    return _run(softmax_gradient_kernel, [y, g], [_like(y)], target)[0]


@served_if(_served, NEEDS)
def log_softmax(
    x: jax.Array, *, contract: RowContract, target: Target, functions: ElementwiseContract = PTX_FUNCTIONS
) -> Arrays:
    """Returns the logarithm of the softmax of rows, their maxima and the logarithms of their sums, as `portable` does.

    Guarantee: row-invariant.
    """
    honour("log_softmax", contract, row_contract())
    honour("log_softmax", functions, PTX_FUNCTIONS)
    return _run(log_softmax_kernel, [x], [_like(x), _number(x), _number(x)], target)


@served_if(_served, NEEDS)
def log_softmax_gradient(
    x: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    contract: RowContract,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
) -> jax.Array:
    """Returns the gradient of `log_softmax`, see `portable.log_softmax_gradient`.

    Guarantee: row-invariant.
    """
    honour("log_softmax_gradient", contract, row_contract())
    honour("log_softmax_gradient", functions, PTX_FUNCTIONS)
    return _run(log_softmax_gradient_kernel, [x, m, log_sum, g], [_like(x)], target)[0]


@served_if(lambda x, **_: _served(x) and x.shape[1] > 0, NEEDS)
def logsumexp(
    x: jax.Array, *, contract: RowContract, target: Target, functions: ElementwiseContract = PTX_FUNCTIONS
) -> Arrays:
    """Returns m and log(s) of rows, whose sum is the logarithm of the sum of exponentials, see `portable.logsumexp`.

    Guarantee: row-invariant.
    """
    honour("logsumexp", contract, row_contract())
    honour("logsumexp", functions, PTX_FUNCTIONS)
    return _run(logsumexp_kernel, [x], [_number(x), _number(x)], target)


@served_if(_served, NEEDS)
def logsumexp_gradient(
    x: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
) -> jax.Array:
    """Returns the gradient of `logsumexp`, see `portable.logsumexp_gradient`.

    Guarantee: row-invariant.
    """
    honour("logsumexp_gradient", functions, PTX_FUNCTIONS)
    return _run(logsumexp_gradient_kernel, [x, m, log_sum, g], [_like(x)], target)[0]


def _run(kernel: Any, arrays: list[jax.Array], out: list[jax.ShapeDtypeStruct], target: Target) -> Arrays:
    m, columns = arrays[0].shape
    if 0 in (m, columns):
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    contract = row_contract()
    return launch(
        kernel,
        *arrays,
        target=target,
        out=out,
        grid=(m,),
        warps=warps(columns, contract),
        stages=1,
        fuses=False,
        constants=sizes(columns, contract),
    )


def _like(rows: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(rows.shape, rows.dtype)


def _number(rows: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows.shape[0], 1), jnp.float32)
