"""Cross entropy of rows of logits against integer labels, and its gradient, on any platform.

With m the maximum of a row, s = sum(exp(x - m)) and lse = m + log(s) the loss of a row is
log(s) - (x[label] - m) + z_loss * lse * lse.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, RowContract, honour
from pallas_kernels.parts.xla.lanes import STATISTIC, Arrays, add_lanes, exp_minus, log, map_rows, max_lanes, product


def cross_entropy(
    x: jax.Array,
    labels: jax.Array,
    *,
    z_loss: float,
    contract: RowContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> Arrays:
    """Returns the loss of each row.

    Args:
        x: (M, C) logits of any floating dtype.
        labels: (M, 1) int32. A row with a negative label is ignored: its loss is 0. A label of C or more gives nan.
        z_loss: Weight of the square of logsumexp in the loss.
        contract: Order of the sum.
        functions: How exp and log are computed.

    Returns:
        The loss, m and log(s), (M, 1) float32 each.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> x, labels = jnp.array([[5.0], [5.0], [5.0]]), jnp.array([[0], [-1], [1]])
        >>> cross_entropy(x, labels, z_loss=0.0, contract=row_contract())[0].tolist()
        [[0.0], [0.0], [nan]]
    """
    honour("cross_entropy", functions, XLA_FUNCTIONS)

    def program(x: jax.Array, labels: jax.Array) -> Arrays:
        m = max_lanes(x, contract)
        log_sum = log(add_lanes(exp_minus(x, m), contract))
        picked = jnp.take_along_axis(x, jnp.clip(labels, 0, c - 1), axis=1).astype(jnp.float32)
        loss = log_sum - (picked - m)
        if z_loss:
            lse = m + log_sum
            loss = loss + product(jnp.float32(z_loss) * lse, lse)
        loss = jnp.where(labels < c, loss, jnp.nan)
        return jnp.where(labels < 0, jnp.float32(0), loss), m, log_sum

    c = x.shape[1]
    if c == 0:
        nothing = jnp.zeros(labels.shape, jnp.float32)
        return jnp.where(labels < 0, nothing, jnp.nan), nothing, nothing
    return map_rows(program, [x, labels], [STATISTIC, STATISTIC, STATISTIC])


def cross_entropy_gradient(
    x: jax.Array,
    labels: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    z_loss: float,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> jax.Array:
    """Returns the gradient of the logits: softmax(x) * (g * (1 + 2 * z_loss * lse)), minus g at the label.

    No one-hot array is stored.

    Args:
        x: (M, C) logits.
        labels: (M, 1) int32, as in `cross_entropy`.
        m: (M, 1) float32, from `cross_entropy`.
        log_sum: (M, 1) float32, from `cross_entropy`.
        g: (M, 1) float32, the cotangent of the loss.
        z_loss: As in `cross_entropy`.
        functions: How exp and log are computed.

    Returns:
        (M, C) in the dtype of `x`; 0 in ignored rows, nan in rows whose label is C or more.

    Guarantee: row-invariant.
    """
    honour("cross_entropy_gradient", functions, XLA_FUNCTIONS)

    def program(x: jax.Array, labels: jax.Array, m: jax.Array, log_sum: jax.Array, g: jax.Array) -> Arrays:
        scale = g
        if z_loss:
            scale = g * (1 + product(jnp.float32(2 * z_loss), m + log_sum))
        share = product(exp_minus(x, m, log_sum), jnp.where(labels < c, scale, jnp.nan))
        column = lax.broadcasted_iota(jnp.int32, (1, c), 1)
        dx = jnp.where(column == labels, share - g, share)
        return (jnp.where(labels < 0, jnp.float32(0), dx).astype(x.dtype),)

    c = x.shape[1]
    return map_rows(program, [x, labels, m, log_sum, g], [jax.ShapeDtypeStruct((c,), x.dtype)])[0]
