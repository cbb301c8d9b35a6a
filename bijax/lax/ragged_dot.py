"""Products of rows that are sorted by group (experts), with the operands and parameters of JAX's own primitive."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from bijax.dispatch.groups import group_matmul_kernel, group_weight_gradient_kernel
from bijax.dispatch.matmul import Product
from bijax.dispatch.precision import precision_name
from bijax.lax.dot_general import dot_general
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.tiles import isolate

_OP = "ragged_dot_general"


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiplies the rows of `lhs` by the weights of their groups, or sums their outer products by group.

    Args:
        lhs: Array of float32, bfloat16, float16 or float64; one of its dimensions is ragged.
        rhs: Array of the same dtypes.
        group_sizes: Integers; the last axis holds the lengths of the groups along the ragged dimension.
        ragged_dot_dimension_numbers: As in `jax.lax.ragged_dot_general`, like the following ones.
        precision: On the CPU every precision is full float32.
        preferred_element_type: Dtype of the result.
        group_offset: Must be None, as in the stock primitive.
        out_sharding: Not used.

    Returns:
        An array of the stock primitive's shape and dtype, rounded once. Rows in no group are zero. Everything is nan if
        sizes are negative or add up to more than the number of rows.

    Raises:
        UnsupportedError: If the dtype is unsupported or `group_offset` is passed.

    Guarantee: row-invariant: a row's bits depend on the row and on the weights of its group alone, as in
    `dot_general`. Where the ragged dimension is contracted, a group's sum depends on its own rows alone, in their order
    (`pallas_kernels.contract.ChunkContract`; on a Hopper GPU, in 16 bits, `WgmmaChunkContract`).

    Example:
        >>> numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
        >>> ragged_dot_general(x, w, jnp.array([1, 2]), ragged_dot_dimension_numbers=numbers).tolist()
        [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    """
    del out_sharding
    if group_offset is not None:
        raise UnsupportedError(f"{_OP}: group_offset must be None, got {group_offset!r}; cut group_sizes instead.")
    numbers = ragged_dot_dimension_numbers
    (lhs_contracting, _), (lhs_batch, _) = numbers.dot_dimension_numbers
    stock = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    out = jax.eval_shape(stock, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs, group_sizes)))
    dtype = accumulator(_OP, jnp.promote_types(lhs.dtype, rhs.dtype))
    (ragged,) = numbers.lhs_ragged_dimensions
    if 0 in (*lhs.shape, *rhs.shape, *out.shape):
        return jnp.zeros(out.shape, out.dtype)
    if ragged in lhs_batch:  # every row of such a group has its own weights
        y = dot_general(
            lhs,
            rhs,
            dimension_numbers=numbers.dot_dimension_numbers,
            precision=precision,
            preferred_element_type=dtype,
        )
    elif ragged in lhs_contracting:
        y = _sums(
            lhs, rhs, group_sizes, numbers, Product(out.dtype.name, precision=precision_name(precision)), dtype.name
        )
    else:
        y = _rows(lhs, rhs, group_sizes, numbers, Product(out.dtype.name, precision=precision_name(precision)))
    return y.reshape(out.shape).astype(out.dtype)


def _rows(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    numbers: lax.RaggedDotDimensionNumbers,
    product: Product,
) -> jax.Array:
    """The ragged dimension is a free one of lhs: (batch, lhs free, rhs free), each flattened."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,), (group,) = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    free = [d for d in range(lhs.ndim) if d not in lhs_contracting and d not in lhs_batch]
    outer, inner = free[: free.index(ragged)], free[free.index(ragged) + 1 :]
    columns = [d for d in range(rhs.ndim) if d != group and d not in rhs_contracting and d not in rhs_batch]
    pairs = sorted(zip(rhs_contracting, lhs_contracting, strict=True))
    terms = [d for d, _ in pairs]

    x = _arranged(lhs, lhs_batch, outer, [ragged, *inner], [d for _, d in pairs])
    # The weights are not transposed: their storage is a part of the order.
    by_rows = max(terms, default=-1) > max(columns, default=-1)
    w = _arranged(rhs, rhs_batch, [group], *((columns, terms) if by_rows else (terms, columns)))
    sizes = _sizes(group_sizes, x.shape[:2], math.prod(lhs.shape[d] for d in inner), lhs.shape[ragged])
    product = replace(product, transpose_w=by_rows)

    def entry(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return _map(lambda x, sizes: group_matmul_kernel(x, w, sizes, product=product)[0], x, sizes)

    return _map(entry, x, w, sizes)


def _sums(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    numbers: lax.RaggedDotDimensionNumbers,
    product: Product,
    wide: str,
) -> jax.Array:
    """The ragged dimension is contracted: (groups, batch, lhs free, rhs free), each flattened."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    at = lhs_contracting.index(ragged)
    x, g = (
        _arranged(
            a,
            batch,
            contracting[:at],
            contracting[at:],
            [d for d in range(a.ndim) if d not in contracting and d not in batch],
        )
        for a, contracting, batch in ((lhs, lhs_contracting, lhs_batch), (rhs, rhs_contracting, rhs_batch))
    )
    inner = math.prod(lhs.shape[d] for d in lhs_contracting[at + 1 :])
    sizes = _sizes(group_sizes, x.shape[:2], inner, lhs.shape[ragged])

    if x.shape[1] > 1:
        product = replace(product, out_dtype=wide)

    def entry(x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
        parts = _map(lambda *operands: group_weight_gradient_kernel(*operands, product=product)[0], x, g, sizes)
        total = parts[0]
        if parts.shape[0] > 1:
            total = lax.fori_loop(1, parts.shape[0], lambda i, total: isolate(total + parts[i])[0], total)
        return total

    return _map(entry, x, g, sizes).swapaxes(0, 1)


def _arranged(x: jax.Array, *groups: Sequence[int]) -> jax.Array:
    """Returns the array with one dimension for each group of its dimensions."""
    order = [d for group in groups for d in group]
    return x.transpose(order).reshape([math.prod(x.shape[d] for d in group) for group in groups])


def _sizes(group_sizes: jax.Array, lead: tuple[int, ...], times: int, rows: int) -> jax.Array:
    """Returns the sizes in rows as (batch, outer, groups) int32; invalid ones stay invalid."""
    if group_sizes.dtype.itemsize < 4:
        group_sizes = group_sizes.astype(jnp.int32)
    if times > 1 or group_sizes.dtype != jnp.int32:
        possible = (group_sizes >= 0) & (group_sizes <= rows)
        group_sizes = jnp.where(possible, group_sizes.astype(jnp.int32) * times, jnp.int32(-1))
    if group_sizes.ndim == 1:
        return jnp.broadcast_to(group_sizes, (*lead, group_sizes.shape[0]))
    return group_sizes.reshape(*lead, group_sizes.shape[-1])


def _map(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Applies a function to the entries of the arrays, one after another."""
    if arrays[0].shape[0] == 1:
        return function(*(a[0] for a in arrays))[None]
    return lax.map(lambda entries: function(*entries), arrays)
