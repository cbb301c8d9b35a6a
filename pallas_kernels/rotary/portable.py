"""Rotation of pairs of columns, on any platform."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.parts.xla.groups import ungrouped
from pallas_kernels.parts.xla.join import join
from pallas_kernels.parts.xla.lanes import run_flat
from pallas_kernels.parts.xla.opaque import apart_from_sums
from pallas_kernels.parts.xla.tiles import isolate, run_isolated
from pallas_kernels.parts.xla.where import where

Fence = Callable[[jax.Array], jax.Array]


def rotate(
    x: jax.Array,
    sin: jax.Array,
    cos: jax.Array,
    *,
    interleaved: bool,
    inverse: bool = False,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> jax.Array:
    """Rotates pairs of columns: the first of a pair is x * cos - partner * sin, the second x * cos + partner * sin.

    Computed in float32 with both products rounded; the result is rounded to the dtype of `x`.

    Args:
        x: (..., D) of any floating dtype, D even.
        sin: (..., D) of any floating dtype, broadcastable with `x`.
        cos: Same shape as `sin`.
        interleaved: Whether pairs are columns 2i and 2i + 1 rather than i and i + D / 2.
        inverse: Whether to apply the transpose: each partner takes the sine of its own column, with the sign negated.
        functions: How element-wise code is computed.

    Returns:
        Array with the shape and dtype of `x`.

    Guarantee: row-invariant.

    Example:
        >>> rotate(jnp.array([1.0, 2.0]), jnp.ones(2), jnp.zeros(2), interleaved=False).tolist()
        [-2.0, 1.0]
    """
    if not interleaved:
        return _rotate_halves(x, sin, cos, inverse, functions)

    def program(x: jax.Array, sin: jax.Array, cos: jax.Array) -> tuple[jax.Array]:
        options: dict[str, Any] = {"interleaved": interleaved, "inverse": inverse, "functions": functions}
        return (rotated(x, sin, cos, **options, fence=apart_from_sums),)

    return run_isolated(program, x, sin, cos)[0]


def _rotate_halves(
    x: jax.Array, sin: jax.Array, cos: jax.Array, inverse: bool, functions: ElementwiseContract
) -> jax.Array:
    """Rotates the two halves as two whole-vector results; on a CPU, swapping partners would access single elements."""
    honour("rotate", functions, XLA_FUNCTIONS)

    def program(x: jax.Array, sin: jax.Array, cos: jax.Array) -> tuple[jax.Array, jax.Array]:
        halves = [jnp.split(a.astype(jnp.float32), 2, axis=-1) for a in (x, sin, cos)]
        (low, high), (sin_low, sin_high), (cos_low, cos_high) = halves
        first, second = apart_from_sums(low * cos_low), apart_from_sums(high * cos_high)
        if inverse:
            first, second = first - -apart_from_sums(high * sin_high), second - apart_from_sums(low * sin_low)
        else:
            first, second = first + apart_from_sums(-high * sin_low), second + apart_from_sums(low * sin_high)
        return first.astype(x.dtype), second.astype(x.dtype)

    return join(run_isolated(program, x, sin, cos), x.ndim - 1)


def rotate_on_gpu(
    x: jax.Array,
    sin: jax.Array,
    cos: jax.Array,
    *,
    interleaved: bool,
    inverse: bool,
    functions: ElementwiseContract,
) -> jax.Array:
    """`rotate` for platforms where fences in the lowering keep XLA from contracting products with sums."""
    options: dict[str, Any] = {"interleaved": interleaved, "inverse": inverse, "functions": functions}
    return rotated(x, sin, cos, **options, fence=lambda product: product)


def rotated(
    x: jax.Array,
    sin: jax.Array,
    cos: jax.Array,
    *,
    interleaved: bool,
    inverse: bool,
    functions: ElementwiseContract,
    fence: Fence,
) -> jax.Array:
    """`rotate` as one element-wise program; `fence` keeps products from being contracted with sums."""
    honour("rotate", functions, XLA_FUNCTIONS)
    wide = x.astype(jnp.float32)
    along = fence(wide * cos.astype(jnp.float32))
    if inverse:
        across = _partner(fence(wide * sin.astype(jnp.float32)), interleaved)
        return (along - across).astype(x.dtype)
    across = fence(_partner(wide, interleaved) * sin.astype(jnp.float32))
    return (along + across).astype(x.dtype)


def _partner(x: jax.Array, interleaved: bool) -> jax.Array:
    """Returns each column's partner, negated for the first of a pair; it uses no slices, so XLA can fuse it."""
    half = x.shape[-1] // 2
    pairs = x.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    axis = pairs.ndim - 1 if interleaved else pairs.ndim - 2
    other = lax.rev(pairs, (axis,))
    first = lax.broadcasted_iota(jnp.int32, pairs.shape, axis) == 0
    return jnp.where(first, -other, other).reshape(x.shape)


def _store(cache: jax.Array, at: jax.Array, heads: jax.Array) -> jax.Array:
    """Writes the last K heads of each token, (T, N, H), to its row of a cache (R, K, H)."""
    return cache.at[at].set(heads[:, heads.shape[1] - cache.shape[1] :], mode="drop")


def _store_columns(cache: jax.Array, at: jax.Array, heads: jax.Array) -> jax.Array:
    """`_store` with heads side by side in the rows of matrices: XLA:CPU copies long rows in one loop.

    Loops over heads take three times as long to compile.
    """
    rows, width = cache.shape[0], cache.shape[1] * cache.shape[2]
    (columns,) = isolate(heads.reshape(heads.shape[0], heads.shape[1] * heads.shape[2]))
    columns = columns[:, columns.shape[1] - width :]
    return cache.reshape(rows, width).at[at].set(columns, mode="drop").reshape(cache.shape)


def rotate_and_store(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    to_rotate: jax.Array | None = None,
    *,
    groups: int = 1,
    functions: ElementwiseContract = XLA_FUNCTIONS,
    compute: Callable[..., tuple[jax.Array, ...]] = run_flat,
    store: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = _store_columns,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates queries and keys, and writes keys and values to the caches.

    A head (x, y) of two halves becomes (x * cos - y * sin, y * cos + x * sin), computed in float32 and rounded once.

    Args:
        heads: (T, N + 2 * K, H) of any floating dtype, H even: query, key and value heads of each token.
        cos: (T, H / 2) float32.
        sin: (T, H / 2) float32.
        rows: (T,) int32, the cache row for the keys and values of each token; tokens with an out-of-range row are not
            stored. Rows must be distinct.
        keys: (R, K, H) of the dtype of `heads`.
        values: Same shape and dtype as `keys`.
        to_rotate: (T, N + K, H) of the dtype of `heads`: rotated instead of the queries and keys in `heads`, for
            example their normalized values.
        groups: Groups that the heads of a token are in, each with an equal share of queries, keys and values in turn.
            `to_rotate` has none.
        functions: How element-wise code is computed.
        compute: Runs an element-wise program on arrays of one shape.
        store: Writes the last heads of each token to a cache.

    Returns:
        The rotated queries (T, N, H), and `keys` and `values` with the new rows.

    Guarantee: row-invariant.

    Example:
        >>> heads, tables = jnp.ones((1, 3, 2)), (jnp.zeros((1, 1)), jnp.ones((1, 1)))
        >>> caches = (jnp.zeros((2, 1, 2)), jnp.zeros((2, 1, 2)))
        >>> query, keys, values = rotate_and_store(heads, *tables, jnp.array([1]), *caches)
        >>> query.tolist(), keys[:, 0].tolist(), values[:, 0].tolist()
        ([[[-1.0, 1.0]]], [[0.0, 0.0], [-1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]])
    """
    honour("rotate_and_store", functions, XLA_FUNCTIONS)
    key_heads = keys.shape[1]
    query_heads = heads.shape[1] - 2 * key_heads
    heads = side_by_side(heads, key_heads, groups)
    source = heads[:, : query_heads + key_heads] if to_rotate is None else to_rotate

    first, second = jnp.split(source, 2, axis=-1)
    tables = (jnp.broadcast_to(table[:, None], first.shape) for table in (cos, sin))
    both = join(compute(rotate_pairs, first, second, *tables), first.ndim - 1)
    # A negative index would count from the end.
    at = where(lax.lt(rows, np.asarray(0, rows.dtype)), keys.shape[0], rows)
    return both[:, :query_heads], store(keys, at, both), store(values, at, heads)


def side_by_side(heads: jax.Array, key_heads: int, groups: int) -> jax.Array:
    """Returns heads (..., N + 2 * K, H) that are in groups as all queries, then all keys, then all values.

    Example:
        >>> heads = jnp.arange(8).reshape(8, 1)  # two groups of two queries, a key and a value
        >>> side_by_side(heads, 2, 2)[:, 0].tolist()
        [0, 1, 4, 5, 2, 6, 3, 7]
    """
    keys = key_heads // groups
    return ungrouped(heads, (heads.shape[-2] // groups - 2 * keys, keys, keys), groups, axis=-2)


def rotate_and_store_on_gpu(
    *arrays: jax.Array, groups: int = 1, functions: ElementwiseContract
) -> tuple[jax.Array, ...]:
    """`rotate_and_store` for platforms where fences in the lowering keep XLA from contracting products with sums."""
    return rotate_and_store(
        *arrays, groups=groups, functions=functions, compute=lambda program, *arrays: program(*arrays), store=_store
    )


def rotate_pairs(first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotates pairs in float32; the four arrays have the same shape."""
    dtype = jnp.result_type(jnp.float32, cos, sin)
    x, y = (a.astype(jnp.float32).astype(dtype) for a in (first, second))
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    along, across = lax.sub(lax.mul(x, cos), lax.mul(y, sin)), lax.add(lax.mul(y, cos), lax.mul(x, sin))
    return along.astype(first.dtype), across.astype(first.dtype)
