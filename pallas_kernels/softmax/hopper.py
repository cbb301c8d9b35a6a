"""The softmax family on rows, and its gradients, on a Hopper GPU: the formulas of `portable`.

The maximum and the sum of exponentials are computed in one pass, in the order of `OnlineRowContract`; other sums follow
`RowContract`. Exponentials are ex2.approx.ftz of the product with log2(e), corrected for the rounding of that product
if results are float32; logarithms are libdevice's logf (`pallas_kernels.parts.hopper.arithmetic`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ElementwiseContract,
    OnlineRowContract,
    RowContract,
    honour,
    row_contract,
)
from pallas_kernels.parts.hopper.arithmetic import exponential
from pallas_kernels.parts.hopper.map_engine import run_map
from pallas_kernels.parts.hopper.online_row import OnlineRow
from pallas_kernels.parts.hopper.row import Row
from pallas_kernels.parts.hopper.row_engine import NEEDS, run_rows, supports
from pallas_kernels.parts.hopper.softmax_engine import run_online
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.lanes import Arrays
from pallas_kernels.schedule.hopper.softmax import OnlineSchedule


def _has_elements(x: jax.Array, **_: Any) -> bool:
    return x.shape[1] > 0


@served_if(_has_elements, "rows of at least one element")
def softmax(
    x: jax.Array,
    *,
    contract: OnlineRowContract,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
    schedule: OnlineSchedule | None = None,
) -> jax.Array:
    """Returns the softmax of rows, as `portable.softmax`.

    `contract` is `online_row_contract(C)`. `schedule` does not affect the bits; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant.
    """
    honour("softmax", functions, PTX_FUNCTIONS)
    exact = x.dtype == jnp.float32

    def finish(row: OnlineRow, m: jax.Array, s: jax.Array) -> Arrays:
        return m, row.quotient(1, _or_nan(m, s))

    def step(row: OnlineRow, x: jax.Array, m: jax.Array, reciprocal: jax.Array) -> Arrays:
        return (row.product(row.exponential(x - m, exact=exact), reciprocal),)

    return run_online(finish, x, step, [x.dtype], contract=contract, interpret=interpret, schedule=schedule)[0]


@served_if(_has_elements, "rows of at least one element")
def log_softmax(
    x: jax.Array,
    *,
    contract: OnlineRowContract,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
    schedule: OnlineSchedule | None = None,
) -> Arrays:
    """Returns the logarithm of the softmax of rows, m and log(s), as `portable.log_softmax`; arguments as in `softmax`.

    Guarantee: row-invariant.
    """
    honour("log_softmax", functions, PTX_FUNCTIONS)

    def finish(row: OnlineRow, m: jax.Array, s: jax.Array) -> Arrays:
        log_sum = row.logarithm(_or_nan(m, s))
        row.put(0, m)
        row.put(1, log_sum)
        return m, log_sum

    def step(_: OnlineRow, x: jax.Array, m: jax.Array, log_sum: jax.Array) -> Arrays:
        return ((x - m) - log_sum,)

    return run_online(finish, x, step, [x.dtype], contract=contract, numbers=2, interpret=interpret, schedule=schedule)


@served_if(_has_elements, "rows of at least one element")
def logsumexp(
    x: jax.Array,
    *,
    contract: OnlineRowContract,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
    schedule: OnlineSchedule | None = None,
) -> Arrays:
    """Returns m and log(s) of rows, as `portable.logsumexp`; arguments as in `softmax`.

    Guarantee: row-invariant.
    """
    honour("logsumexp", functions, PTX_FUNCTIONS)

    def finish(row: OnlineRow, m: jax.Array, s: jax.Array) -> Arrays:
        row.put(0, jnp.where(jnp.abs(m) < jnp.inf, m, 0.0))
        row.put(1, row.logarithm(s))
        return ()

    return run_online(finish, x, contract=contract, numbers=2, interpret=interpret, schedule=schedule)


def logsumexp_gradient(
    x: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
) -> jax.Array:
    """Returns the gradient of logsumexp: exp((x - m) - log(s)) * g, as `portable.logsumexp_gradient`.

    Guarantee: row-invariant.
    """
    honour("logsumexp_gradient", functions, PTX_FUNCTIONS)
    exact = x.dtype == jnp.float32

    def begin(row: OnlineRow) -> Arrays:
        return row.known(0), row.known(1), row.known(2)

    def step(row: OnlineRow, x: jax.Array, m: jax.Array, log_sum: jax.Array, g: jax.Array) -> jax.Array:
        return row.product(row.exponential((x - m) - log_sum, exact=exact), g)

    return run_map(begin, step, x, [m, log_sum, g], interpret=interpret)


@served_if(lambda y, g, **_: supports(y.shape[1], y.dtype, g.dtype), NEEDS)
def softmax_gradient(y: jax.Array, g: jax.Array, *, contract: RowContract, interpret: Any = False) -> jax.Array:
    """Returns the gradient of softmax: y * (g - sum(y * g)), with the bits of `portable.softmax_gradient`.

    Guarantee: row-invariant.
    """
    honour("softmax_gradient", contract, row_contract())

    def program(row: Row) -> None:
        total = row.fold(row.product)
        row.emit(lambda y, g: (row.product(y, g - total),))

    return run_rows(program, [y, g], results=[y.dtype], interpret=interpret)[0]


@served_if(lambda x, m, log_sum, g, **_: supports(x.shape[1], x.dtype, g.dtype), NEEDS)
def log_softmax_gradient(
    x: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    contract: RowContract,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
) -> jax.Array:
    """Returns the gradient of log_softmax: g - softmax(x) * sum(g), as `portable.log_softmax_gradient`.

    Guarantee: row-invariant.
    """
    honour("log_softmax_gradient", contract, row_contract())
    honour("log_softmax_gradient", functions, PTX_FUNCTIONS)
    exact = x.dtype == jnp.float32

    def program(row: Row) -> None:
        m, log_sum = row.given(0), row.given(1)
        total = row.fold(lambda _, g: g)

        def gradient(x: jax.Array, g: jax.Array) -> Arrays:
            share = exponential((x - m) - log_sum, interpret, exact=exact)
            return (g - row.product(share, total),)

        row.emit(gradient)

    return run_rows(program, [x, g], results=[x.dtype], given=[m, log_sum], interpret=interpret)[0]


def _or_nan(m: jax.Array, s: jax.Array) -> jax.Array:
    """The sum, or nan for a row that contains only -inf, or any +inf."""
    return jnp.where(jnp.abs(m) < jnp.inf, s, jnp.nan)
