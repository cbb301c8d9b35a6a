"""Products of matrices of 8 bits with their scales as primitives, which choose their kernel for the platform.

Sums of integers are the same in every order, and the steps after them are fixed, so all int8 kernels have the same
bits. The float8 kernels follow `Float8Contract`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.contracts import note
from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import run_if_served
from bijax.ops.moe._experts import rows_by_count
from bijax.ops.quantized._float8 import CONTRACT as FLOAT8
from bijax.ops.quantized._float8 import float8_product
from bijax.ops.quantized._integer import dequantize, integer_product
from pallas_kernels.contract import QuantContract
from pallas_kernels.ragged_dot.portable import multiply_groups
from pallas_kernels.target import Target

_CONTRACT: Final = QuantContract()


def _is_float8(x: jax.Array) -> bool:
    return x.dtype == jnp.float8_e4m3fn


def _product(x: jax.Array, w: jax.Array) -> Callable[..., jax.Array]:
    """Returns the portable product, noted with its contract."""
    product, contract = (float8_product, FLOAT8) if _is_float8(x) else (integer_product, _CONTRACT)
    note(product, contract, arrays=(x, w))
    return product


def _portable(
    x: jax.Array,
    w: jax.Array,
    row: jax.Array,
    column: jax.Array,
    *bias: jax.Array,
    transposed: tuple[bool, bool],
    dtype: str,
) -> Arrays:
    total = _product(x, w)(x, w, *transposed)
    return (dequantize(total, row, column, bias[0] if bias else None, jnp.dtype(dtype)),)


def _quantized(
    target: Target,
    x: jax.Array,
    w: jax.Array,
    row: jax.Array,
    column: jax.Array,
    *bias: jax.Array,
    transposed: tuple[bool, bool],
    dtype: str,
) -> Arrays:
    given = x, w, row, column
    options = {"bias": bias[0] if bias else None, "transposed": transposed, "out_dtype": dtype}
    like = functools.partial(_results_like, rows=x.shape[int(transposed[0])])
    y = run_if_served("quantized_product", target, x.dtype.name, *given, like=like, **options)
    return _portable(*given, *bias, transposed=transposed, dtype=dtype) if y is None else (y,)


def _portable_groups(
    x: jax.Array, w: jax.Array, row: jax.Array, column: jax.Array, sizes: jax.Array, *, dtype: str
) -> Arrays:
    product = _product(x, w)
    rows = rows_by_count("bijax.moe_quant_group_gemm", "experts_token_count", sizes, w.shape[0], x.shape[0])
    used = rows.expert < w.shape[0]
    if 0 in (*x.shape, *w.shape):
        total = jnp.zeros((x.shape[0], w.shape[2]), jnp.float32 if _is_float8(x) else jnp.int32)
    else:
        total = multiply_groups(x, w, rows.count, product=product)
    row = jnp.where(rows.fit, jnp.where(used, row, jnp.float32(0)), jnp.float32(jnp.nan))
    if w.shape[0] == 0:
        by_row = jnp.zeros(total.shape, column.dtype)
    else:
        by_row = jnp.take(column, rows.expert, axis=0, mode="clip")
        # A scale that is not finite must not meet the zero of a row that is not used.
        by_row = jnp.where(used[:, None], by_row, jnp.ones((), column.dtype))
    return (dequantize(total, row, by_row, None, jnp.dtype(dtype)),)


def _quantized_groups(
    target: Target, x: jax.Array, w: jax.Array, row: jax.Array, column: jax.Array, sizes: jax.Array, *, dtype: str
) -> Arrays:
    given = x, w, row, column, sizes
    like = functools.partial(_results_like, rows=x.shape[0])
    y = run_if_served("quantized_groups", target, x.dtype.name, *given, like=like, out_dtype=dtype)
    return _portable_groups(*given, dtype=dtype) if y is None else (y,)


def _results_like(*arrays: jax.Array, rows: int, out_dtype: str, **_: Any) -> jax.Array:
    return jnp.zeros((rows, arrays[3].shape[-1]), out_dtype)


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
    """Rows of a mapped axis are more rows."""
    if parameters["transposed"][0] or any(d is not None for d in (axes[1], *axes[3:])):
        return None
    x, row = fold_rows(size, (arrays[0], arrays[2]), (axes[0], axes[2]))
    return unfold_rows(size, quantized_kernel(x, arrays[1], row, *arrays[3:], **parameters))


def _shape(x: jax.Array, w: jax.Array, *_: jax.Array, transposed: tuple[bool, bool], dtype: str) -> Arrays:
    return (jnp.zeros((x.shape[int(transposed[0])], w.shape[int(not transposed[1])]), dtype),)


def _groups_shape(x: jax.Array, w: jax.Array, *_: jax.Array, dtype: str) -> Arrays:
    return (jnp.zeros((x.shape[0], w.shape[2]), dtype),)


quantized_kernel = define_kernel("quantized_product", _quantized, _fold, _shape)
"""(M, K) x (K, N) of 8 bits, either stored the other way round; scales (M,) and (N,); a fifth one is a bias (N,)."""

quantized_groups_kernel = define_kernel("quantized_groups", _quantized_groups, shapes=_groups_shape)
"""(M, K) x (G, K, N) of 8 bits, scales (M,) and (G, N), and sizes (G,) int32."""
