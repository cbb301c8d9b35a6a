"""Quantisation of rows, on any platform.

Every step except SwiGLU's exponential is correctly rounded, and no product is fused with a sum, so the formulas in the
docstrings determine the bits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, QuantizeContract, RowContract, honour
from pallas_kernels.parts.xla.lanes import STATISTIC, Arrays, add_lanes, map_rows, product, reciprocal_root, run_flat
from pallas_kernels.parts.xla.narrow import SMALLEST_SCALE, quantize_columns
from pallas_kernels.parts.xla.tiles import isolate, map_row_tiles
from pallas_kernels.schedule.cpu.rows import rows_at_once

Columns = Callable[[jax.Array], jax.Array]


def quantize(
    x: jax.Array,
    smooth: jax.Array | None = None,
    place: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    contract: QuantizeContract,
) -> Arrays:
    """Quantises rows x * smooth, by the formulas of `QuantizeContract`.

    Args:
        x: (S, C) of any floating dtype.
        smooth: (C,) of any floating dtype, or (E, C) with `expert`.
        place: (M, 1) int32, the row of `x` for each row of the result; by default the same row.
        expert: (M, 1) int32, the row of `smooth` that multiplies each row; -1 for an unused row (zeros and a scale of
            0), -2 for an invalid row (zeros and a scale of nan).
        contract: The format.

    Returns:
        (M, C) of the format and the scales (M, 1) float32.

    Guarantee: row-invariant.

    Example:
        >>> y, scale = quantize(jnp.array([[1.0, -127.0]]), jnp.array([4.0, 1.0]), contract=QuantizeContract())
        >>> y.tolist(), scale.tolist()
        ([[4, -127]], [[1.0]])
    """
    return _quantize(lambda x: x.astype(jnp.float32), x.shape[1], x, smooth, place, expert, contract)


def quantize_swiglu(
    x: jax.Array,
    smooth: jax.Array | None = None,
    place: jax.Array | None = None,
    expert: jax.Array | None = None,
    *,
    contract: QuantizeContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> Arrays:
    """Quantises rows silu(gate) * up * smooth, where the first half of a row of `x` is gate and the second half up.

    Args:
        x: (S, 2 * C) of any floating dtype.
        smooth: As in `quantize`.
        place: As in `quantize`.
        expert: As in `quantize`.
        contract: The format.
        functions: How silu is computed.

    Returns:
        (M, C) of the format and the scales (M, 1) float32.

    Guarantee: row-invariant.

    Example:
        >>> y, scale = quantize_swiglu(jnp.array([[100.0, 1.27]]), contract=QuantizeContract())
        >>> y.tolist()
        [[127]]
    """
    honour("quantize_swiglu", functions, XLA_FUNCTIONS)

    def product(gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
        return (jax.nn.silu(gate) * up,)

    def columns(x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x.astype(jnp.float32), 2, axis=1)
        return run_flat(product, gate, up)[0]

    return _quantize(columns, x.shape[1] // 2, x, smooth, place, expert, contract)


def quantize_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    smooth: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    quantize: QuantizeContract,
) -> Arrays:
    """Quantises rows h / sqrt(mean(h * h) + eps) * weight * smooth, h = x + residual, products from left to right.

    Args:
        x: (M, C) of any floating dtype.
        weight: (C,) of any floating dtype.
        smooth: (C,) of any floating dtype.
        residual: (M, C) of the dtype of `x`; the sum is rounded to that dtype before the norm is taken.
        eps: Added to the mean square.
        contract: Order of the sum.
        quantize: The format.

    Returns:
        (M, C) of the format, the scales (M, 1) float32, and, if a residual is given, the sum h (M, C).

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> options = {"eps": 0.0, "contract": row_contract(), "quantize": QuantizeContract()}
        >>> quantize_norm(jnp.array([[3.0, -3.0]]), **options)[0].tolist()
        [[127, -127]]
    """
    c = x.shape[1]
    out = [jax.ShapeDtypeStruct((c,), quantize.format), STATISTIC]
    vectors = [v for v in (weight, smooth) if v is not None]
    vectors = [v.astype(jnp.float32) for v in isolate(*vectors)] if vectors else []

    def program(x: jax.Array, *residual: jax.Array) -> Arrays:
        h = x.astype(jnp.float32)
        if residual:
            (total,) = isolate((h + residual[0].astype(jnp.float32)).astype(x.dtype))
            h = total.astype(jnp.float32)
        n = h * reciprocal_root(add_lanes(product(h, h), contract), c, eps)
        for v in vectors:
            n = n * v
        y, scale = quantize_columns(n, quantize)
        return (y, scale, total) if residual else (y, scale)

    if c == 0:
        y, scale = _of_no_columns(x.shape[0], 0, None, quantize)
        return (y, scale) if residual is None else (y, scale, x)
    if residual is None:
        return map_rows(program, [x], out)
    return map_rows(program, [x, residual], [*out, jax.ShapeDtypeStruct((c,), x.dtype)])


def _quantize(
    columns: Columns,
    width: int,
    x: jax.Array,
    smooth: jax.Array | None,
    place: jax.Array | None,
    expert: jax.Array | None,
    contract: QuantizeContract,
) -> Arrays:
    """Quantises `columns` of the rows, float32 with `width` columns, times their smooth scales."""

    def program(*tile: jax.Array) -> Arrays:
        left = iter(tile)
        rows = jnp.take(x, next(left)[:, 0], axis=0, mode="clip") if place is not None else next(left)
        h = columns(rows)
        if expert is None:
            return quantize_columns(h if smooth is None else h * smooth.astype(jnp.float32), contract)
        number = next(left)
        if smooth is not None:
            h = h * jnp.take(smooth, number[:, 0], axis=0, mode="clip").astype(jnp.float32)
        y, scale = quantize_columns(h, contract)
        used = number >= 0
        return jnp.where(used, y, jnp.zeros((), y.dtype)), jnp.where(used, scale, _unused_scale(number))

    tiled = [x if place is None else place, *([] if expert is None else [expert])]
    out = [jax.ShapeDtypeStruct((width,), contract.format), STATISTIC]
    m = tiled[0].shape[0]
    if m == 0 or width == 0:
        return _of_no_columns(m, width, expert, contract)
    return map_row_tiles(lambda _: program, lambda left: rows_at_once(left, width), tiled, out)


def _unused_scale(expert: jax.Array) -> jax.Array:
    return jnp.where(expert == -1, jnp.float32(0), jnp.float32(jnp.nan))


def _of_no_columns(m: int, width: int, expert: jax.Array | None, contract: QuantizeContract) -> Arrays:
    scale = jnp.full((m, 1), SMALLEST_SCALE, jnp.float32)
    if expert is not None:
        scale = jnp.where(expert >= 0, scale, _unused_scale(expert))
    return jnp.zeros((m, width), contract.format), scale
