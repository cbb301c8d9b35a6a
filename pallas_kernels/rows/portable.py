"""Sums by fixed trees of plain additions, on any platform that JAX runs on."""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ChunkContract, ElementwiseContract, RowContract, honour
from pallas_kernels.parts.xla.lanes import add_lanes, add_rows, divide, product
from pallas_kernels.parts.xla.tiles import fold_row_chunks, isolate


def sum_axis(x: jax.Array, *, contract: RowContract, mean: bool = False) -> jax.Array:
    """Adds along the middle axis.

    There are only additions, so the rows need no tiles: the bits do not depend on the shape.

    Args:
        x: (A, R, B) of any floating dtype.
        contract: Order of the sum.
        mean: Whether to divide the sum by R.

    Returns:
        (A, B) float32. A sum of zeros is +0, regardless of their signs.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> sum_axis(jnp.ones((1, 300, 2)), contract=row_contract()).tolist()
        [[300.0, 300.0]]
    """
    a, r, b = x.shape
    if 0 in x.shape:
        return jnp.full((a, b), jnp.nan if mean else 0.0, jnp.float32)
    (x,) = isolate(x)
    total = add_lanes(x.reshape(a, r) if b == 1 else x, contract).reshape(a, b)
    total = jnp.where(total == 0, jnp.float32(0), total)
    if mean:
        total = divide(total, r)
    return isolate(total)[0]


def variance(x: jax.Array, *, ddof: int, contract: RowContract) -> tuple[jax.Array, jax.Array]:
    """Returns sum(d * d) / (R - ddof) along the middle axis, with d = x - sum(x) / R.

    Args:
        x: (A, R, B) of any floating dtype.
        ddof: Subtracted from R; the result is nan if the difference is not positive.
        contract: Order of the sums.

    Returns:
        The variance and the mean, (A, B) float32.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> y, mean = variance(jnp.array([[[1.0], [3.0]]]), ddof=1, contract=row_contract())
        >>> y.tolist(), mean.tolist()
        ([[2.0]], [[2.0]])
    """
    mean = sum_axis(x, contract=contract, mean=True)
    if x.shape[1] <= ddof:
        return jnp.full(mean.shape, jnp.nan, jnp.float32), mean
    d = isolate(x)[0].astype(jnp.float32) - mean[:, None]
    return isolate(divide(sum_axis(product(d, d), contract=contract), x.shape[1] - ddof))[0], mean


def variance_gradient(
    x: jax.Array, mean: jax.Array, g: jax.Array, *, ddof: int, functions: ElementwiseContract = XLA_FUNCTIONS
) -> jax.Array:
    """Returns the gradient of `variance`: (x - mean) * ((g + g) / (R - ddof)); nan where the mean is not finite.

    Args:
        x: (A, R, B), the argument.
        mean: (A, B) float32, from `variance`.
        g: (A, B) float32, the cotangent of the variance.
        ddof: As in `variance`.
        functions: How element-wise code is computed.

    Returns:
        (A, R, B) in the dtype of `x`.

    Guarantee: row-invariant.
    """
    honour("variance_gradient", functions, XLA_FUNCTIONS)
    if x.shape[1] <= ddof:
        return jnp.full(x.shape, jnp.nan, x.dtype)
    (scale,) = isolate(divide(g + g, x.shape[1] - ddof))
    gradient = (isolate(x)[0].astype(jnp.float32) - mean[:, None]) * scale[:, None]
    # The sign of a product of two nans depends on the operand order that the compiler chooses, so return one nan.
    return isolate(jnp.where(jnp.isfinite(mean)[:, None], gradient, jnp.nan).astype(x.dtype))[0]


def sum_rows(x: jax.Array, *, contract: ChunkContract, accumulate: jax.Array | None = None) -> jax.Array:
    """Adds the rows of a batch.

    A chunk of rows is added by a halving tree (row i plus row i + rows/2, and so on), chunk sums in ascending order.

    Args:
        x: (M, C) of any floating dtype.
        contract: Chunks of rows; their number of rows must be a power of two.
        accumulate: (C,) float32, a previous sum to continue.

    Returns:
        (C,) float32.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> sum_rows(jnp.ones((300, 2)), contract=chunk_contract()).tolist()
        [300.0, 300.0]
    """
    (x,) = isolate(x)
    total = jnp.zeros(x.shape[1:], jnp.float32) if accumulate is None else accumulate
    return fold_row_chunks(lambda chunk: add_rows(chunk.astype(jnp.float32)), [x], contract.rows, total)
