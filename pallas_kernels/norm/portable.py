"""Norms of rows and their gradients, on any platform.

Every step is correctly rounded and no product is contracted with a sum (`parts.xla.lanes`), so the formulas in the
docstrings determine the bits, with sums in the order of `RowContract`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import ChunkContract, RowContract
from pallas_kernels.parts.xla.lanes import (
    STATISTIC,
    Arrays,
    add_lanes,
    add_rows,
    divide,
    map_rows,
    product,
    reciprocal_root,
)
from pallas_kernels.parts.xla.tiles import fold_row_chunks, isolate


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    dtype: str | None = None,
    contract: RowContract,
) -> Arrays:
    """Divides rows by their root mean square: h * (1 / sqrt(sum(h * h) / C + eps)) * w, h = x + residual.

    Here w = weight + offset, in float32. Without a weight w is the offset, and with neither nothing is multiplied.

    Args:
        x: (M, C) of any floating dtype.
        weight: (C,) of any floating dtype.
        residual: (M, C) of the dtype of `x`, or float32, and then rounded to that dtype first; the sum is rounded to it
            before the norm is taken.
        eps: Added to the mean square.
        offset: Added to the weight.
        dtype: Dtype of the result; that of `x` by default.
        contract: Order of the sum.

    Returns:
        The result (M, C), the factor of each row (M, 1) in float32, and, if a residual is given,
        the sum h (M, C).

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> y, factor = rms_norm(jnp.array([[3.0, 3.0]]), eps=0.0, contract=row_contract())
        >>> y.tolist(), factor.shape
        ([[1.0, 1.0]], (1, 1))
    """
    c = x.shape[1]
    row = jax.ShapeDtypeStruct((c,), x.dtype)
    result = jax.ShapeDtypeStruct((c,), x.dtype if dtype is None else dtype)
    out = [result, STATISTIC] if residual is None else [result, STATISTIC, row]
    scale = _scale(weight, offset, c)

    def program(x: jax.Array, *residual: jax.Array) -> Arrays:
        h = x.astype(jnp.float32)
        if residual:
            (added,) = residual if residual[0].dtype == x.dtype else isolate(residual[0].astype(x.dtype))
            (total,) = isolate((h + added.astype(jnp.float32)).astype(x.dtype))
            h = total.astype(jnp.float32)
        factor = reciprocal_root(add_lanes(product(h, h), contract), c, eps)
        y = h * factor if scale is None else h * factor * scale
        y = y.astype(result.dtype)
        return (y, factor, total) if residual else (y, factor)

    rows = [x] if residual is None else [x, residual]
    return map_rows(program, rows, out)


def rms_norm_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    g_sum: jax.Array | None = None,
    *,
    offset: float = 0.0,
    contract: RowContract,
) -> Arrays:
    """Returns the gradient of `rms_norm`: factor * (gw - n * (sum(gw * n) / C)) + g_sum.

    Here n = h * factor and gw = g * w, with w as in `rms_norm`.

    Args:
        h: (M, C), the rows whose norm was taken.
        factor: (M, 1) float32, from `rms_norm`.
        g: (M, C), cotangent of the result.
        weight: (C,) of any floating dtype.
        g_sum: (M, C), cotangent of the sum with the residual.
        offset: As in `rms_norm`.
        contract: Order of the sums.

    Returns:
        The gradient (M, C) of `h` in its dtype.

    Guarantee: row-invariant.
    """
    c = h.shape[1]
    out = [jax.ShapeDtypeStruct((c,), h.dtype)]
    scale = _scale(weight, offset, c)

    def program(h: jax.Array, factor: jax.Array, g: jax.Array, *g_sum: jax.Array) -> Arrays:
        g = g.astype(jnp.float32)
        normal = h.astype(jnp.float32) * factor
        gw = g if scale is None else product(g, scale)
        shift = product(normal, _mean(product(gw, normal), contract))
        dh = product(factor, gw - shift) + g_sum[0].astype(jnp.float32) if g_sum else factor * (gw - shift)
        return (dh.astype(h.dtype),)

    rows = [h, factor, g] if g_sum is None else [h, factor, g, g_sum]
    return map_rows(program, rows, out)


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
) -> Arrays:
    """Normalises rows: d * (1 / sqrt(sum(d * d) / C + eps)) * weight + bias, d = x - sum(x) / C.

    Args:
        x: (M, C) of any floating dtype.
        weight: (C,) of any floating dtype.
        bias: (C,) of any floating dtype.
        eps: Added to the variance.
        contract: Order of the sums.

    Returns:
        The result (M, C) in the dtype of `x`, and the mean and the factor of each row, (M, 1) float32.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> y, mean, factor = layer_norm(jnp.array([[1.0, 3.0]]), eps=0.0, contract=row_contract())
        >>> y.tolist(), mean.tolist(), factor.tolist()
        ([[-1.0, 1.0]], [[2.0]], [[1.0]])
    """
    c = x.shape[1]
    out = [jax.ShapeDtypeStruct((c,), x.dtype), STATISTIC, STATISTIC]
    scale, shift = _scale(weight), _scale(bias)

    def program(x: jax.Array) -> Arrays:
        mean = _mean(x, contract)
        d = x.astype(jnp.float32) - mean
        factor = reciprocal_root(add_lanes(product(d, d), contract), c, eps)
        y = d * factor if scale is None else d * factor * scale
        if shift is not None:
            y = product(d, factor) + shift if scale is None else product(d * factor, scale) + shift
        return y.astype(x.dtype), mean, factor

    return map_rows(program, [x], out)


def layer_norm_gradient(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    *,
    contract: RowContract,
) -> Arrays:
    """Returns the gradient of `layer_norm`: factor * (gw - sum(gw) / C - n * (sum(gw * n) / C)).

    Here n = (x - mean) * factor and gw = g * weight.

    Args:
        x: (M, C), the rows that were normalised.
        mean: (M, 1) float32, from `layer_norm`.
        factor: (M, 1) float32, from `layer_norm`.
        g: (M, C), cotangent of the result.
        weight: (C,) of any floating dtype.
        contract: Order of the sums.

    Returns:
        The gradient (M, C) of `x` in its dtype.

    Guarantee: row-invariant.
    """
    c = x.shape[1]
    out = [jax.ShapeDtypeStruct((c,), x.dtype)]
    scale = _scale(weight)

    def program(x: jax.Array, mean: jax.Array, factor: jax.Array, g: jax.Array) -> Arrays:
        g = g.astype(jnp.float32)
        normal = (x.astype(jnp.float32) - mean) * factor
        gw = g if scale is None else product(g, scale)
        shift = product(normal, _mean(product(gw, normal), contract))
        return ((factor * (gw - _mean(gw, contract) - shift)).astype(x.dtype),)

    return map_rows(program, [x, mean, factor, g], out)


def weight_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    mean: jax.Array | None = None,
    *,
    contract: ChunkContract,
    dtype: str = "float32",
) -> jax.Array:
    """Returns the gradient of the weight of a norm: g * ((h - mean) * factor), added over the rows.

    Args:
        h: (M, C), the rows whose norm was taken.
        factor: (M, 1) float32, from `rms_norm` or `layer_norm`.
        g: (M, C), cotangent of the result.
        mean: (M, 1) float32, from `layer_norm`.
        contract: Order of the sum over the rows; the rows of a chunk are added by a halving tree.
        dtype: Dtype of the result; the sum is rounded once.

    Returns:
        (C,) of `dtype`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> h, factor = jnp.ones((3, 2)), jnp.full((3, 1), 2.0)
        >>> weight_gradient(h, factor, h, contract=chunk_contract()).tolist()
        [6.0, 6.0]
    """

    def chunk_sum(h: jax.Array, factor: jax.Array, g: jax.Array, *mean: jax.Array) -> jax.Array:
        d = h.astype(jnp.float32)
        if mean:
            d = d - mean[0]
        (normal,) = isolate(d * factor)
        return add_rows(product(g.astype(jnp.float32), normal))

    rows = isolate(h, factor, g) if mean is None else isolate(h, factor, g, mean)
    total = fold_row_chunks(chunk_sum, rows, contract.rows, jnp.zeros(h.shape[1:], jnp.float32))
    return total.astype(dtype)


def _mean(x: jax.Array, contract: RowContract) -> jax.Array:
    return isolate(divide(add_lanes(x, contract), x.shape[1]))[0]


def _scale(weight: jax.Array | None, offset: float = 0.0, columns: int = 0) -> jax.Array | None:
    """Returns what rows are multiplied by: the weight plus the offset, or the one of them that there is."""
    if weight is None:
        return isolate(jnp.full((columns,), offset, jnp.float32))[0] if offset else None
    # After a barrier, or a product that made the weight would be contracted with the sum.
    scale = isolate(weight)[0].astype(jnp.float32)
    return isolate(scale + jnp.float32(offset))[0] if offset else scale
