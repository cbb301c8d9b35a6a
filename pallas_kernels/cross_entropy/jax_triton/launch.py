"""Cross entropy of rows of logits, and its gradient, on NVIDIA GPUs from Ampere on, by Triton kernels.

The formulas and the order of sums are those of `portable`; exp and log are sequences of instructions of their own
(`PTX_FUNCTIONS`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import PTX_FUNCTIONS, ElementwiseContract, RowContract, honour, row_contract
from pallas_kernels.cross_entropy.jax_triton.kernels import (
    cross_entropy_gradient_kernel,
    cross_entropy_kernel,
    cross_entropy_of_sum_kernel,
)
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
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]


@served_if(lambda x, *_, **__: rows_served(x) and x.shape[1] > 0, f"{NEEDS}, with at least one column")
def cross_entropy(
    x: jax.Array,
    labels: jax.Array,
    *,
    z_loss: float,
    contract: RowContract,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Returns the loss of each row, m and log(s), see `portable.cross_entropy`.

    Guarantee: row-invariant.
    """
    honour("cross_entropy", contract, row_contract())
    honour("cross_entropy", functions, PTX_FUNCTIONS)
    options: dict[str, Any] = {"Z_LOSS": float(z_loss)}
    out = [number_of_each(x)] * 3
    if (parts := schedule_if_parts(x, schedule)) is not None:
        others = [labels, *maxima_and_sums(x, target, parts)]
        return launch_parts(cross_entropy_of_sum_kernel, x, others, out, target, parts, **options)
    exact = x.dtype == jnp.float32
    return launch_rows(cross_entropy_kernel, x, [labels], out, target, schedule, EXACT=exact, **options)


@served_if(lambda x, *_, **__: rows_served(x), NEEDS)
def cross_entropy_gradient(
    x: jax.Array,
    labels: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    z_loss: float,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    schedule: RowSchedule | None = None,
) -> jax.Array:
    """Returns the gradient of the logits, see `portable.cross_entropy_gradient`.

    Guarantee: row-invariant.
    """
    honour("cross_entropy_gradient", functions, PTX_FUNCTIONS)
    options: dict[str, Any] = {"TWICE_Z_LOSS": float(2 * z_loss), "EXACT": x.dtype == jnp.float32}
    others = [labels, m, log_sum, g]
    if (parts := schedule_if_parts(x, schedule)) is not None:  # nothing is added
        return launch_parts(cross_entropy_gradient_kernel, x, others, [like(x)], target, parts, **options)[0]
    return launch_rows(cross_entropy_gradient_kernel, x, others, [like(x)], target, schedule, **options)[0]
