"""Cross entropy of rows of logits, and its gradient, on a Hopper GPU: the formulas of `cross_entropy.tiled`.

The softmax is never stored: the loss needs the maximum and the sum of exponentials (`OnlineRowContract`) and the logit
of the label; the gradient is written once, in the dtype of the logits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ElementwiseContract,
    OnlineRowContract,
    PartsChunkContract,
    PartsContract,
    honour,
)
from pallas_kernels.parts.hopper.map_engine import run_map
from pallas_kernels.parts.hopper.online_row import OnlineRow
from pallas_kernels.parts.hopper.row_launch import Parted
from pallas_kernels.parts.hopper.softmax_engine import run_online
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.lanes import Arrays
from pallas_kernels.schedule.hopper.softmax import OnlineSchedule


@served_if(lambda x, labels, **_: x.shape[1] > 0, "at least one logit")
def cross_entropy(
    x: jax.Array,
    labels: jax.Array,
    *,
    z_loss: float,
    contract: OnlineRowContract,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
    schedule: OnlineSchedule | None = None,
) -> Arrays:
    """Returns the loss of each row, m and log(s), as `portable.cross_entropy`.

    `contract` is `online_row_contract(C)`. `schedule` does not affect the bits; `interpret` runs the kernel on a CPU.

    Guarantee: row-invariant.
    """
    honour("cross_entropy", functions, PTX_FUNCTIONS)
    c = x.shape[1]

    def finish(row: OnlineRow, m: jax.Array, s: jax.Array) -> Arrays:
        label = row.known(0)
        log_sum = row.logarithm(jnp.where(jnp.abs(m) < jnp.inf, s, jnp.nan))
        loss = log_sum - (row.pick(_column(label, c)) - m)
        if z_loss:
            lse = m + log_sum
            loss = loss + row.product(row.product(jnp.float32(z_loss), lse), lse)
        loss = jnp.where(label < c, loss, jnp.nan)
        row.put(0, jnp.where(label < 0, 0.0, loss))
        row.put(1, m)
        row.put(2, log_sum)
        return ()

    return run_online(finish, x, contract=contract, given=[labels], numbers=3, interpret=interpret, schedule=schedule)


def cross_entropy_gradient(
    x: jax.Array,
    labels: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    z_loss: float,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
) -> jax.Array:
    """Returns the gradient of the logits, as `portable.cross_entropy_gradient`.

    Guarantee: row-invariant.
    """
    honour("cross_entropy_gradient", functions, PTX_FUNCTIONS)
    return _gradient(x, [labels, m, log_sum, g], x.shape[1], z_loss, None, interpret)


def cross_entropy_gradient_of_parts(
    x: jax.Array,
    labels: jax.Array,
    places: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    columns: int,
    z_loss: float,
    contract: PartsContract,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    interpret: Any = False,
) -> jax.Array:
    """Returns the gradient of some columns of the logits as bfloat16 limbs, with the bits of `cross_entropy_gradient`.

    Args:
        x: (M, C) float32, some of the columns; M is a multiple of 16.
        labels: As for `cross_entropy_gradient`.
        places: (M, 1) int32, the columns of the labels in `x`; others than 0 to C - 1 for labels elsewhere.
        m: As for `cross_entropy_gradient`.
        log_sum: As for `cross_entropy_gradient`.
        g: As for `cross_entropy_gradient`.
        columns: Number of all columns.
        z_loss: As for `cross_entropy_gradient`.
        contract: The limbs.
        functions: How exponentials are computed.
        interpret: As for `cross_entropy_gradient`.

    Returns:
        (parts * M, C), as `matmul.hopper.parts.matmul_of_parts` takes it.

    Guarantee: row-invariant.
    """
    honour("cross_entropy_gradient_of_parts", functions, PTX_FUNCTIONS)
    limbs = Parted(jnp.dtype(jnp.bfloat16), contract.parts, PartsChunkContract(contract.parts).rows)
    return _gradient(x, [labels, m, log_sum, g, places], columns, z_loss, limbs, interpret)


def _gradient(
    x: jax.Array, given: Sequence[jax.Array], columns: int, z_loss: float, result: Parted | None, interpret: Any
) -> jax.Array:
    """Returns the gradient of logits of `columns` columns; `x` has some of them if the labels' places are given."""
    exact = x.dtype == jnp.float32

    def begin(row: OnlineRow) -> Arrays:
        label, m, log_sum, g = (row.known(i) for i in range(4))
        scale = g
        if z_loss:
            scale = row.product(g, 1 + row.product(jnp.float32(2 * z_loss), m + log_sum))
        kept = jnp.where(label < 0, jnp.float32(0), jnp.float32(1))
        return label, m, log_sum, g, jnp.where(label < columns, scale, jnp.nan), kept

    def share(
        row: OnlineRow, x: jax.Array, label: Any, m: Any, log_sum: Any, g: Any, scale: Any, kept: Any
    ) -> jax.Array:
        value = row.product(row.exponential((x - m) - log_sum, exact=exact), scale)
        # An ignored row may contain nan, so it must be zeroed by a select.
        return jnp.where(row.spread(kept, x) > 0, value, 0.0)

    def change(row: OnlineRow, *numbers: Any) -> tuple[jax.Array, jax.Array]:
        label, g = numbers[0], numbers[3]
        place = label if len(given) == 4 else row.known(4)
        column = _column(place, x.shape[1])
        value = share(row, row.pick(column), *numbers) - g
        if len(given) > 4:
            column = jnp.where((place >= 0) & (place < x.shape[1]), column, -1)
        return column, jnp.where(label < 0, 0.0, value)

    return run_map(begin, share, x, given, change=change, result=result, interpret=interpret)


def _column(label: jax.Array, columns: int) -> jax.Array:
    return jnp.minimum(jnp.maximum(label, 0), columns - 1)
