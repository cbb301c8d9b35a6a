"""The softmax family on rows, and its gradients, on NVIDIA GPUs from Ampere on, by Triton kernels.

Sums have the order of `portable`; exp and log are sequences of instructions of their own (`PTX_FUNCTIONS`), where the
portable programs have XLA's. The gradient of softmax, which has neither, has the bits of `portable`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import PTX_FUNCTIONS, ElementwiseContract, RowContract, honour, row_contract
from pallas_kernels.parts.jax_triton.row_launch import (
    NEEDS,
    launch_parts,
    launch_rows,
    like,
    maxima_and_sums,
    number_of_each,
    rows_served,
    schedule_if_parts,
)
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.jax_triton.rows import RowSchedule
from pallas_kernels.softmax.jax_triton.kernels import (
    log_softmax_gradient_kernel,
    log_softmax_kernel,
    logsumexp_gradient_kernel,
    logsumexp_kernel,
    softmax_gradient_kernel,
    softmax_kernel,
)
from pallas_kernels.softmax.jax_triton.parts import log_softmax_of_sum_kernel, softmax_of_sum_kernel
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]


@served_if(lambda x, *_, **__: rows_served(x), NEEDS)
def softmax(
    x: jax.Array,
    *,
    contract: RowContract,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    schedule: RowSchedule | None = None,
) -> jax.Array:
    """Returns the softmax of rows, see `portable.softmax`.

    Guarantee: row-invariant.
    """
    honour("softmax", contract, row_contract())
    honour("softmax", functions, PTX_FUNCTIONS)
    if (parts := schedule_if_parts(x, schedule)) is not None:
        found = maxima_and_sums(x, target, parts)
        return launch_parts(softmax_of_sum_kernel, x, found, [like(x)], target, parts, EXACT=_exact(x))[0]
    return launch_rows(softmax_kernel, x, [], [like(x)], target, schedule, EXACT=_exact(x))[0]


@served_if(lambda y, *_, **__: rows_served(y), NEEDS)
def softmax_gradient(
    y: jax.Array, g: jax.Array, *, contract: RowContract, target: Target, schedule: RowSchedule | None = None
) -> jax.Array:
    """Bit-identical to `portable.softmax_gradient`.

    Guarantee: row-invariant.
    """
    honour("softmax_gradient", contract, row_contract())
    return launch_rows(softmax_gradient_kernel, y, [g], [like(y)], target, schedule)[0]


@served_if(lambda x, *_, **__: rows_served(x), NEEDS)
def log_softmax(
    x: jax.Array,
    *,
    contract: RowContract,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Returns the logarithm of the softmax of rows, their maxima and the logarithms of their sums, as `portable` does.

    Guarantee: row-invariant.
    """
    honour("log_softmax", contract, row_contract())
    honour("log_softmax", functions, PTX_FUNCTIONS)
    out = [like(x), number_of_each(x), number_of_each(x)]
    if (parts := schedule_if_parts(x, schedule)) is not None:
        return launch_parts(log_softmax_of_sum_kernel, x, maxima_and_sums(x, target, parts), out, target, parts)
    return launch_rows(log_softmax_kernel, x, [], out, target, schedule, EXACT=_exact(x))


@served_if(lambda x, *_, **__: rows_served(x), NEEDS)
def log_softmax_gradient(
    x: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    contract: RowContract,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    schedule: RowSchedule | None = None,
) -> jax.Array:
    """Returns the gradient of `log_softmax`, see `portable.log_softmax_gradient`.

    Guarantee: row-invariant.
    """
    honour("log_softmax_gradient", contract, row_contract())
    honour("log_softmax_gradient", functions, PTX_FUNCTIONS)
    others = [m, log_sum, g]
    return launch_rows(log_softmax_gradient_kernel, x, others, [like(x)], target, schedule, EXACT=_exact(x))[0]


@served_if(lambda x, **_: rows_served(x) and x.shape[1] > 0, NEEDS)
def logsumexp(
    x: jax.Array,
    *,
    contract: RowContract,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Returns m and log(s) of rows, whose sum is the logarithm of the sum of exponentials, see `portable.logsumexp`.

    Guarantee: row-invariant.
    """
    honour("logsumexp", contract, row_contract())
    honour("logsumexp", functions, PTX_FUNCTIONS)
    out = [number_of_each(x), number_of_each(x)]
    return launch_rows(logsumexp_kernel, x, [], out, target, schedule, EXACT=_exact(x))


@served_if(lambda x, *_, **__: rows_served(x), NEEDS)
def logsumexp_gradient(
    x: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    schedule: RowSchedule | None = None,
) -> jax.Array:
    """Returns the gradient of `logsumexp`, see `portable.logsumexp_gradient`.

    Guarantee: row-invariant.
    """
    honour("logsumexp_gradient", functions, PTX_FUNCTIONS)
    others = [m, log_sum, g]
    return launch_rows(logsumexp_gradient_kernel, x, others, [like(x)], target, schedule, EXACT=_exact(x))[0]


def _exact(x: jax.Array) -> bool:
    return x.dtype == jnp.float32
