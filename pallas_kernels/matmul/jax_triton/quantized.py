"""Scaled products of 8-bit matrices by the Triton kernel of matmul, also of rows in groups (experts)."""

from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Float8Contract, QuantContract, honour
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.jax_triton.groups import MOST_GROUPS, check_sizes
from pallas_kernels.matmul.jax_triton.run import Additions, Sizes, on_tensor_cores
from pallas_kernels.matmul.schedule.jax_triton import Tile, float8_tile, reads_columns
from pallas_kernels.parts.served import served_if
from pallas_kernels.target import Target

_OP: Final = "pallas_kernels.matmul.jax_triton.quantized.quantized_product"
_GROUPS_OP: Final = "pallas_kernels.matmul.jax_triton.quantized.quantized_groups"
_INT8: Final = jnp.dtype(jnp.int8)
_FLOAT8: Final = jnp.dtype(jnp.float8_e4m3fn)


def _serves(x: Any, w: Any, *_: Any, **__: Any) -> bool:
    return x.dtype == w.dtype and x.dtype in (_INT8, _FLOAT8) and 0 not in (*x.shape, *w.shape)


def _serves_groups(x: Any, w: Any, *_: Any, **__: Any) -> bool:
    return _serves(x, w) and w.shape[0] <= MOST_GROUPS


@served_if(_serves, "int8 or float8_e4m3fn operands that are not empty")
def quantized_product(
    x: jax.Array,
    w: jax.Array,
    row_scale: jax.Array,
    column_scale: jax.Array,
    *,
    contract: QuantContract | Float8Contract,
    target: Target,
    transposed: tuple[bool, bool],
    bias: jax.Array | None,
    out_dtype: Any,
    tile: Tile | None = None,
) -> jax.Array:
    """Returns (x @ w) * row_scale * column_scale + bias, each step in float32 and rounded once at the end.

    Args:
        x: (M, K) int8 or float8_e4m3fn, not empty; (K, M), which is copied, if `transposed` says so.
        w: (K, N) of the same dtype, or (N, K). The largest integer sum must fit in int32.
        row_scale: (M,) float32.
        column_scale: (N,) of any float dtype.
        contract: Order of the sums and of the scales.
        target: The GPU that the program is lowered for.
        transposed: Which of the operands are stored transposed.
        bias: (N,) of any float dtype, or None.
        out_dtype: Dtype of the result.
        tile: Chosen from the shape by default. The bits do not depend on it.

    Returns:
        (M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; integer sums are exact in every order.
    """
    x = x.T if transposed[0] else x
    n = w.shape[0 if transposed[1] else 1]
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1 if transposed[1] else 0]:
        raise UnsupportedError(
            f"{_OP}: expected x (M, K) and w (K, N), got x {x.dtype}{list(x.shape)} and w {w.dtype}{list(w.shape)},"
            f" stored {transposed=}."
        )
    _check_scales(_OP, row_scale, column_scale, bias, x.shape[:1], (n,))
    added = Additions(bias=bias, scales=(row_scale, column_scale))
    return _product(_OP, x, w, added, contract, target, transpose_w=transposed[1], out_dtype=out_dtype, tile=tile)


@served_if(_serves_groups, f"int8 or float8_e4m3fn operands that are not empty, and at most {MOST_GROUPS} groups")
def quantized_groups(
    x: jax.Array,
    w: jax.Array,
    row_scale: jax.Array,
    column_scale: jax.Array,
    sizes: jax.Array,
    *,
    contract: QuantContract | Float8Contract,
    target: Target,
    out_dtype: Any,
    transpose_w: bool = False,
    tile: Tile | None = None,
) -> jax.Array:
    """Returns the same for rows in groups, each with the weights of its group.

    Args:
        x: (M, K) int8 or float8_e4m3fn, not empty, sorted by group.
        w: (G, K, N) of the same dtype, or (G, N, K) with `transpose_w`; at most 1024 groups.
        row_scale: (M,) float32.
        column_scale: (G, N) of any float dtype.
        sizes: (G,) int32, the number of rows of each group.
        contract: Order of the sums and of the scales.
        target: The GPU that the program is lowered for.
        out_dtype: Dtype of the result.
        transpose_w: Whether the weights of a group are stored as (N, K).
        tile: Chosen from the shape by default. The bits do not depend on it.

    Returns:
        (M, N) of `out_dtype`. Rows after the last group are zeros. If sizes are negative or add up to more than M,
        the whole result is nan.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; integer sums are exact in every order.
    """
    n = w.shape[1 if transpose_w else 2] if w.ndim == 3 else 0
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2 if transpose_w else 1]:
        raise UnsupportedError(
            f"{_GROUPS_OP}: expected x (M, K) and w (G, K, N), or (G, N, K) with transpose_w, got x"
            f" {x.dtype}{list(x.shape)} and w {w.dtype}{list(w.shape)}, {transpose_w=}."
        )
    _check_scales(_GROUPS_OP, row_scale, column_scale, None, x.shape[:1], (w.shape[0], n))
    check_sizes(_GROUPS_OP, sizes, w.shape[0])
    added = Additions(scales=(row_scale, column_scale), groups=sizes)
    return _product(_GROUPS_OP, x, w, added, contract, target, transpose_w=transpose_w, out_dtype=out_dtype, tile=tile)


def _product(
    op: str,
    x: jax.Array,
    w: jax.Array,
    added: Additions,
    contract: QuantContract | Float8Contract,
    target: Target,
    *,
    transpose_w: bool,
    out_dtype: Any,
    tile: Tile | None,
) -> jax.Array:
    is_float8 = x.dtype == _FLOAT8
    honour(op, contract, Float8Contract(_float8_sums(op, target)) if is_float8 else QuantContract())
    (m, k), n, entries = x.shape, w.shape[-2 if transpose_w else -1], 1 if added.groups is None else w.shape[0]
    if not transpose_w and (is_float8 or not reads_columns(-(-m // entries))):
        w, transpose_w = w.swapaxes(-1, -2), True
    storage = (1, k) if transpose_w else (n, 1)
    one = added.groups is None
    layout = Sizes(entries, m, k, n, (k, 1), storage, (True, one), "" if one else "rows")
    if isinstance(contract, Float8Contract):
        if tile is None:
            stack, rows, _ = layout.per_group
            options: Any = {"shared_memory": target.shared_memory, "features": target.features}
            tile = float8_tile(rows, n, contract.block, **options, stack=stack)
        if tile.depth != contract.block or ("wgmma" in target.features and tile.rows < 64):
            raise UnsupportedError(
                f"{op}: expected a tile whose depth is a block of {contract!r}, on a GPU with wgmma with 64 rows or"
                f" more, got {tile}."
            )
    out = jax.ShapeDtypeStruct((m, n), jnp.dtype(out_dtype))
    return on_tensor_cores(x, w, layout, out, target, tile, replace(added, folds=is_float8))


def _float8_sums(op: str, target: Target) -> Any:
    """Returns how tensor cores of a target sum float8 products."""
    if "wgmma" in target.features:
        return "wgmma32"
    if "mma_float8" in target.features:
        return "mma32"
    raise UnsupportedError(
        f"{op}: expected a GPU with wgmma or mma.sync on float8 (compute capability 8.9, 9.0 and 12), got {target}; the"
        " portable program multiplies in bfloat16."
    )


def _check_scales(
    op: str, row_scale: Any, column_scale: Any, bias: Any, rows: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    given = {"row_scale": row_scale, "column_scale": column_scale, "bias": bias}
    came = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in given.items() if a is not None)
    fits = row_scale.shape == rows and column_scale.shape == columns and row_scale.dtype == jnp.float32
    if not fits or (bias is not None and bias.shape != columns):
        raise UnsupportedError(
            f"{op}: expected row_scale float32{list(rows)}, column_scale and bias {list(columns)}, got {came}."
        )
