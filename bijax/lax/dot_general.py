"""The general dot product, for code that is written with `jax.numpy` and made invariant as a whole.

A product's order of summation is chosen from the length of the contracted dimensions and from how the two operands
are stored, after batch dimensions are left out: an operand is stored "by rows" if its last dimension is contracted
or it has no free dimension, else "by columns".

| lhs | rhs | order of the sum |
|---|---|---|
| by rows | by rows | `matmul_contract(K, transpose_w=True)`, as `x @ w.T` |
| by rows | by columns | `matmul_contract(K, transpose_w=False)`, as `x @ w` |
| by columns | by rows | the same, the operands swapped: products commute exactly |
| by columns | by columns | `chunk_contract()`, as the gradient of weights `x.T @ g` |

In float64 it is always fused chains of 128, added in ascending order. On a Hopper GPU, for two operands of bfloat16 or
float16, it is one chain in every row of the table (`WgmmaContract`, `WgmmaChunkContract`: steps of 16, in order).

Batch dimensions and free dimensions in front do not change the storage, so `vmap` over leading axes keeps the order.
"""

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.core.architecture import target_for
from bijax.core.checks import FLOATS, describe
from bijax.core.contracts import note
from bijax.dispatch.matmul import (
    Product,
    contract_of_sum,
    matmul_kernel,
    stacked_matmul_kernel,
    stacked_weight_gradient_kernel,
    storage_is_free,
    weight_gradient_kernel,
)
from bijax.dispatch.precision import precision_name
from pallas_kernels.contract import IN_TF32, PartsChunkContract, SplitChunkContract, matmul_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.row_major import row_major
from pallas_kernels.parts.xla.tiles import isolate

_OP = "lax.dot_general"
_FEW_ROWS = 32
_FEW = 8
_DTYPES = (*FLOATS, "float64")

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    as_columns: bool = False,
    arrangement: "Arrangement | None" = None,
    on_gpu: bool = True,
) -> jax.Array:
    """Multiplies two arrays as `jax.lax.dot_general` does, with sums in a fixed order.

    Sums are taken in float32, or in float64 where an operand or the result is float64, and rounded once.

    Args:
        lhs: float32, bfloat16, float16 or float64, of any shape, including dimensions of length 0.
        rhs: The same; its dtype may differ.
        dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
        precision: As in `jax.lax.dot_general`. See `bijax.matmul`.
        preferred_element_type: Dtype of the result; one of these dtypes.
        out_sharding: Not used here: the caller that replaces the operation pins the result's sharding.
        as_columns: Whether one of two operands stored by rows represents its transpose: the sum then has the order of
            `x @ w`, not of `x @ w.T`.
        arrangement: Memory layout of the result, where the platform's kernels have the same bits either way; by
            default any.
        on_gpu: Whether the program is for a GPU. It does not change the bits of a platform.

    Returns:
        (batch..., lhs free..., rhs free...), of the dtype that `jax.lax.dot_general` gives.

    Raises:
        UnsupportedError: If an operand or the result has another dtype (complex, or a float of 8 bits), or if
            `precision` is an algorithm that accumulates in another dtype.

    Guarantee: an element's bits depend on its row of `lhs`, its column of `rhs`, the contracted length and the storage
    order of the two operands alone (see the table above). Where both operands are stored by columns the sum is
    split-invariant for cuts at multiples of 128.

    Example:
        >>> x, w = jnp.ones((3, 5), jnp.bfloat16), jnp.ones((5, 2), jnp.bfloat16)
        >>> dot_general(x, w, dimension_numbers=(((1,), (0,)), ((), ()))).shape
        (3, 2)
    """
    del out_sharding
    stock = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    out = jax.eval_shape(stock, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs)))
    _check_dtypes(lhs, rhs, out.dtype)
    wide = any(d == np.float64 for d in (lhs.dtype, rhs.dtype, out.dtype))
    _check_precision(precision, np.float64 if wide else np.float32)
    if 0 in lhs.shape or 0 in rhs.shape:
        return jnp.zeros(out.shape, out.dtype)
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    # Pairs in ascending order of lhs: the order in which they are listed is not a property of the arrays.
    pairs = sorted(zip(lhs_contracting, rhs_contracting, strict=True))
    left = _Operand.of(lhs, lhs_batch, [p[0] for p in pairs])
    right = _Operand.of(rhs, rhs_batch, [p[1] for p in pairs])
    product = Product(out.dtype.name, precision=precision_name(precision), as_columns=as_columns)
    if not wide and _is_sum_over_one_row(left, right) and _needs_kernel_for_one_row(left, right, product, on_gpu):
        return _gradient(left, right, product).reshape(out.shape)
    if arrangement is not None and not wide:
        if not on_gpu and arrangement is Arrangement.OF_LHS and _is_gradient_of_a_matrix(left, right):
            return _gradient(right, left, product)[0].T
        length = left.size(left.contracting)
        if on_gpu and storage_is_free(target_for("cuda"), (lhs.dtype, rhs.dtype), length, product):
            return _arranged_product(left, right, product, arrangement).reshape(out.shape)
    return (_wide_product if wide else _product)(left, right, product).reshape(out.shape)


def storage_may_change(length: int) -> bool:
    """Returns whether `x @ w` and `x @ w.T` add in the same order.

    Args:
        length: Length of the contracted dimension.
    """
    return matmul_contract(length, transpose_w=True) == matmul_contract(length, transpose_w=False)


class Arrangement(enum.Enum):
    """Which free dimensions of a product are innermost in memory."""

    OF_RHS = "of rhs"
    OF_LHS = "of lhs"


class _Operand(NamedTuple):
    """An operand and its dimensions by their role in the product."""

    array: jax.Array
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracting: tuple[int, ...]

    @classmethod
    def of(cls, array: jax.Array, batch: Sequence[int], contracting: Sequence[int]) -> "_Operand":
        free = (d for d in range(array.ndim) if d not in batch and d not in contracting)
        return cls(array, tuple(batch), tuple(free), tuple(contracting))

    @property
    def by_rows(self) -> bool:
        """Whether the last dimension that is not a batch dimension is contracted, or none is free."""
        return not self.free or max(self.free) < max(self.contracting, default=-1)

    @property
    def rows(self) -> int:
        return self.size(self.free)

    def size(self, dims: Sequence[int]) -> int:
        return math.prod(self.array.shape[d] for d in dims)

    def arranged(self, *groups: Sequence[int]) -> jax.Array:
        """Returns the array with one dimension for each group of its dimensions."""
        order = [d for group in groups for d in group]
        array = self.array if order == sorted(order) else row_major(self.array.transpose(order))
        return array.reshape([self.size(group) for group in groups])

    @property
    def stack(self) -> tuple[int, ...]:
        """The free dimensions in front of the contracted ones: with them the array is a stack of (K, N) weights."""
        return tuple(d for d in self.free if d < min(self.contracting, default=0))


def _product(left: _Operand, right: _Operand, product: Product) -> jax.Array:
    """Returns (batch, lhs free, rhs free); the groups of dimensions may still be several."""
    if left.size(left.contracting) == 1:
        return _outer(left, right, jnp.float32).astype(product.out_dtype)
    if not left.by_rows and not right.by_rows:
        return _gradient(left, right, product)
    if left.by_rows and right.by_rows:
        # Either may be the weights; a few rows next to many are the activations. Not at float32 accuracy on a Hopper
        # GPU, where the limbs of the weights and of the activations are multiplied in a fixed order.
        if right.rows < left.rows and right.rows <= _FEW_ROWS and product.precision in IN_TF32:
            return _by_rows(right, left, product).swapaxes(1, 2)
        return _by_rows(left, right, product)
    if left.by_rows:
        return _by_columns(left, right, product)
    return _by_columns(right, left, product).swapaxes(1, 2)


def _arranged_product(left: _Operand, right: _Operand, product: Product, arrangement: Arrangement) -> jax.Array:
    """Returns the same, computed in the wanted memory layout: otherwise XLA would copy the result into it.

    A kernel takes rows that are stored by rows, and weights stored either way. An operand that should be the rows but
    is stored by columns is copied, if it is smaller than the result.
    """
    rows, weights = (left, right) if arrangement is Arrangement.OF_RHS else (right, left)
    length = rows.size(rows.contracting)
    if length == 1 or min(rows.rows, weights.rows) <= _FEW_ROWS:
        return _product(left, right, product)
    if not rows.by_rows and not weights.by_rows:
        y = _gradient(rows, weights, product)
    elif rows.by_rows and not weights.by_rows:
        y = _by_columns(rows, weights, product)
    elif rows.by_rows or length < weights.rows:
        y = _by_rows(rows, weights, product)
    else:
        return _product(left, right, product)
    return y if rows is left else y.swapaxes(1, 2)


def _wide_product(left: _Operand, right: _Operand, product: Product) -> jax.Array:
    """The same in float64, where every storage has the same order."""
    if left.size(left.contracting) == 1:
        return _outer(left, right, jnp.float64).astype(product.out_dtype)
    # A kernel is traced in x64 mode if an operand is 64 bits wide; the conversion is exact.
    x = left.arranged(left.batch, left.free, left.contracting).astype(jnp.float64)
    w = right.arranged(right.batch, right.contracting, right.free).astype(jnp.float64)
    return stacked_matmul_kernel(x, w, product=product)[0]


def _outer(left: _Operand, right: _Operand, dtype: Any) -> jax.Array:
    """One product for each element, added to a zero as in a longer sum."""
    x = left.arranged(left.batch, left.free, left.contracting).astype(dtype)
    y = right.arranged(right.batch, right.contracting, right.free).astype(dtype)
    # Without the barriers the product would be fused with an addition that follows.
    return isolate(x * y)[0] + isolate(jnp.zeros((), dtype))[0]


def _is_sum_over_one_row(left: _Operand, right: _Operand) -> bool:
    """Returns whether it is a sum as the gradient of weights, over a batch of one row."""
    return bool(left.contracting) and left.size(left.contracting) == 1 and not left.by_rows and not right.by_rows


def _needs_kernel_for_one_row(left: _Operand, right: _Operand, product: Product, on_gpu: bool) -> bool:
    """Returns whether the sum over one row is not the rounded product: the contract sums products of limbs.

    Otherwise `_outer` honours the contract, which is recorded as that of more rows.
    """
    target = target_for("cuda" if on_gpu else "cpu")
    if on_gpu and not target.architecture:  # called for this CPU, not by the rule of a program for a GPU
        return False
    contract = contract_of_sum(target, (left.array.dtype, right.array.dtype), product)
    note(_outer, contract, arrays=(left.array, right.array))
    return isinstance(contract, SplitChunkContract | PartsChunkContract)


def _is_gradient_of_a_matrix(left: _Operand, right: _Operand) -> bool:
    """Returns whether the product of two operands stored by columns is one matrix."""
    several = left.batch or left.by_rows or right.by_rows or left.size(left.contracting) == 1
    return not several and len(left.free) == len(right.free) == 1


def _gradient(left: _Operand, right: _Operand, product: Product) -> jax.Array:
    if left.size(left.batch) == 1:
        x, g = (o.arranged((*o.batch, *o.contracting), o.free) for o in (left, right))
        return weight_gradient_kernel(x, g, product=product)[0][None]
    x, g = (o.arranged(o.batch, o.contracting, o.free) for o in (left, right))
    return stacked_weight_gradient_kernel(x, g, product=product)[0]


def _by_rows(rows: _Operand, weights: _Operand, product: Product) -> jax.Array:
    """(batch, M, K) x (batch, N, K)."""
    product = replace(product, transpose_w=True)
    if _scattered_entries(rows, weights):
        return _crossed(rows, weights, product)
    x, w = (o.arranged(o.batch, o.free, o.contracting) for o in (rows, weights))
    return _multiply(x, w, product)


def _by_columns(rows: _Operand, weights: _Operand, product: Product) -> jax.Array:
    """(batch, M, K) x (batch, K, N)."""
    if _scattered_entries(rows, weights):
        return _crossed(rows, weights, product)
    stack = weights.stack
    x = rows.arranged(rows.batch, rows.free, rows.contracting)
    if not stack or rows.rows > weights.rows // weights.size(stack):
        return _multiply(x, weights.arranged(weights.batch, weights.contracting, weights.free), product)
    # Weights of many entries are not copied; the fewer rows are repeated for each.
    g, m, k = x.shape
    entries = weights.size(stack)
    columns = tuple(d for d in weights.free if d not in stack)
    w = weights.arranged((*weights.batch, *stack), weights.contracting, columns)
    x = jnp.broadcast_to(x[:, None], (g, entries, m, k)).reshape(g * entries, m, k)
    y = _multiply(x, w, product).reshape(g, entries, m, -1)
    return y.transpose(0, 2, 1, 3).reshape(g, m, -1)


def _scattered_entries(rows: _Operand, weights: _Operand) -> bool:
    """Returns whether the last batch dimension is an inner one of the weights, as the heads in a cache (B, S, H, D).

    With few rows, a copy that makes each entry contiguous would cost more than the product.
    """
    *first, last = weights.batch or (0,)
    inside = weights.batch and first == list(range(len(first))) and last > len(first)
    if not inside or weights.size((last,)) * rows.rows > _FEW_ROWS:
        return False
    together = weights.contracting == tuple(range(weights.contracting[0], weights.contracting[-1] + 1))
    at_the_end = weights.contracting[-1] == weights.array.ndim - 1
    return together and (at_the_end if weights.by_rows else weights.contracting[0] == len(first))


def _crossed(rows: _Operand, weights: _Operand, product: Product) -> jax.Array:
    """Multiplies the rows of all entries by the weights of all, without a copy, and keeps the matching results."""
    *first, last = weights.batch
    entries = weights.size((last,))
    x = rows.arranged(rows.batch[:-1], (rows.batch[-1], *rows.free), rows.contracting)
    others = [d for d in range(weights.array.ndim) if d not in first and d not in weights.contracting]
    groups = (first, others, weights.contracting) if product.transpose_w else (first, weights.contracting, others)
    y = _multiply(x, weights.arranged(*groups), product)
    y = y.reshape(y.shape[0], entries, rows.rows, *(weights.array.shape[d] for d in others))
    own = [lax.index_in_dim(y[:, i], i, 2 + others.index(last), keepdims=False) for i in range(entries)]
    return jnp.stack(own, axis=1).reshape(-1, rows.rows, weights.rows)


def _multiply(x: jax.Array, w: jax.Array, product: Product) -> jax.Array:
    if x.shape[0] == 1 and max(x.shape[1], w.shape[1 if product.transpose_w else 2]) > _FEW:
        return matmul_kernel(x[0], w[0], product=product)[0][None]
    return stacked_matmul_kernel(x, w, product=product)[0]


def _check_dtypes(lhs: jax.Array, rhs: jax.Array, out: np.dtype[Any]) -> None:
    if any(d.name not in _DTYPES for d in (lhs.dtype, rhs.dtype, out)):
        raise UnsupportedError(
            f"{_OP} has an invariant form for operands and results of {', '.join(_DTYPES)}, got lhs {describe(lhs)},"
            f" rhs {describe(rhs)} and a result of {out.name}. Convert the operands, for example with"
            " .astype(jnp.float32), and leave preferred_element_type at one of these."
        )


def _check_precision(precision: Any, dtype: Any) -> None:
    if not isinstance(precision, lax.DotAlgorithmPreset | lax.DotAlgorithm):
        return
    accumulation = precision.accumulation_type  # None where a preset leaves it open
    if accumulation is not None and np.dtype(accumulation) != dtype:
        raise UnsupportedError(
            f"{_OP} has an invariant form for these operands that accumulates in {np.dtype(dtype).name}, got"
            f" precision={precision!r}. Use None or a jax.lax.Precision."
        )
