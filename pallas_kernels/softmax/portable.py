"""The softmax family on rows, and its gradients, on any platform.

With m the maximum of a row and s = sum(exp(x - m)): softmax is exp(x - m) * (1 / s), log_softmax (x - m) - log(s),
logsumexp m + log(s). Forward passes return m and log(s) separately: their sum would lose digits that gradients need.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, RowContract, honour
from pallas_kernels.parts.xla.lanes import STATISTIC, Arrays, add_lanes, exp_minus, log, map_rows, max_lanes, product
from pallas_kernels.parts.xla.tiles import isolate


def softmax(x: jax.Array, *, contract: RowContract, functions: ElementwiseContract = XLA_FUNCTIONS) -> jax.Array:
    """Returns the softmax of rows.

    Args:
        x: (M, C) of any floating dtype.
        contract: Order of the sum.
        functions: How exp and log are computed.

    Returns:
        (M, C) in the dtype of `x`. A row that contains only -inf, or any +inf or nan, gives nan.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> softmax(jnp.zeros((1, 4)), contract=row_contract()).tolist()
        [[0.25, 0.25, 0.25, 0.25]]
    """
    honour("softmax", functions, XLA_FUNCTIONS)

    def program(x: jax.Array) -> Arrays:
        e = exp_minus(x, max_lanes(x, contract))
        (reciprocal,) = isolate(1 / add_lanes(e, contract))
        return ((e * reciprocal).astype(x.dtype),)

    return map_rows(program, [x], [jax.ShapeDtypeStruct(x.shape[1:], x.dtype)])[0]


def softmax_gradient(y: jax.Array, g: jax.Array, *, contract: RowContract) -> jax.Array:
    """Returns the gradient of softmax: y * (g - sum(y * g)).

    Args:
        y: (M, C), the softmax.
        g: (M, C), its cotangent.
        contract: Order of the sum.

    Returns:
        (M, C) in the dtype of `y`.

    Guarantee: row-invariant.
    """

    def program(y: jax.Array, g: jax.Array) -> Arrays:
        y, g = y.astype(jnp.float32), g.astype(jnp.float32)
        return ((y * (g - add_lanes(product(y, g), contract))).astype(out.dtype),)

    out = jax.ShapeDtypeStruct(y.shape[1:], y.dtype)
    return map_rows(program, [y, g], [out])[0]


def log_softmax(x: jax.Array, *, contract: RowContract, functions: ElementwiseContract = XLA_FUNCTIONS) -> Arrays:
    """Returns the logarithm of the softmax of rows.

    Args:
        x: (M, C) of any floating dtype.
        contract: Order of the sum.
        functions: How exp and log are computed.

    Returns:
        The result (M, C) in the dtype of `x`, and m and log(s), (M, 1) float32.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> log_softmax(jnp.zeros((1, 1)), contract=row_contract())[0].tolist()
        [[0.0]]
    """
    honour("log_softmax", functions, XLA_FUNCTIONS)

    def program(x: jax.Array) -> Arrays:
        m = max_lanes(x, contract)
        log_sum = log(add_lanes(exp_minus(x, m), contract))
        return ((x.astype(jnp.float32) - m) - log_sum).astype(x.dtype), m, log_sum

    return map_rows(program, [x], [jax.ShapeDtypeStruct(x.shape[1:], x.dtype), STATISTIC, STATISTIC])


def log_softmax_gradient(
    x: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    contract: RowContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> jax.Array:
    """Returns the gradient of log_softmax: g - softmax(x) * sum(g).

    Args:
        x: (M, C), the argument.
        m: (M, 1) float32, from `log_softmax`.
        log_sum: (M, 1) float32, from `log_softmax`.
        g: (M, C), the cotangent.
        contract: Order of the sum.
        functions: How exp and log are computed.

    Returns:
        (M, C) in the dtype of `x`.

    Guarantee: row-invariant.
    """
    honour("log_softmax_gradient", functions, XLA_FUNCTIONS)

    def program(x: jax.Array, m: jax.Array, log_sum: jax.Array, g: jax.Array) -> Arrays:
        share = product(exp_minus(x, m, log_sum), add_lanes(g, contract))
        return ((g.astype(jnp.float32) - share).astype(x.dtype),)

    return map_rows(program, [x, m, log_sum, g], [jax.ShapeDtypeStruct(x.shape[1:], x.dtype)])[0]


def logsumexp(x: jax.Array, *, contract: RowContract, functions: ElementwiseContract = XLA_FUNCTIONS) -> Arrays:
    """Returns m and log(s) of rows, whose sum is the logarithm of the sum of exponentials.

    Args:
        x: (M, C) of any floating dtype.
        contract: Order of the sum.
        functions: How exp and log are computed.

    Returns:
        m and log(s), (M, 1) float32. If the maximum is not finite, m is 0, so that a row of only -inf gives -inf and a
        row with +inf gives +inf.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> m, log_sum = logsumexp(jnp.array([[2.0], [-jnp.inf]]), contract=row_contract())
        >>> (m + log_sum).tolist()
        [[2.0], [-inf]]
    """
    honour("logsumexp", functions, XLA_FUNCTIONS)

    def program(x: jax.Array) -> Arrays:
        m = max_lanes(x, contract)
        (m,) = isolate(jnp.where(jnp.isfinite(m), m, jnp.float32(0)))
        return m, log(add_lanes(exp_minus(x, m), contract))

    if x.shape[1] == 0:
        return jnp.zeros((x.shape[0], 1), jnp.float32), jnp.full((x.shape[0], 1), -jnp.inf, jnp.float32)
    return map_rows(program, [x], [STATISTIC, STATISTIC])


def logsumexp_gradient(
    x: jax.Array, m: jax.Array, log_sum: jax.Array, g: jax.Array, *, functions: ElementwiseContract = XLA_FUNCTIONS
) -> jax.Array:
    """Returns the gradient of logsumexp: exp((x - m) - log(s)) * g.

    Args:
        x: (M, C), the argument.
        m: (M, 1) float32, from `logsumexp`.
        log_sum: (M, 1) float32, from `logsumexp`.
        g: (M, 1) float32, the cotangent.
        functions: How exp and log are computed.

    Returns:
        (M, C) in the dtype of `x`.

    Guarantee: row-invariant.
    """
    honour("logsumexp_gradient", functions, XLA_FUNCTIONS)

    def program(x: jax.Array, m: jax.Array, log_sum: jax.Array, g: jax.Array) -> Arrays:
        return ((exp_minus(x, m, log_sum) * g).astype(x.dtype),)

    return map_rows(program, [x, m, log_sum, g], [jax.ShapeDtypeStruct(x.shape[1:], x.dtype)])[0]
