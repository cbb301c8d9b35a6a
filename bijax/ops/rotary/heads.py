"""Rotary embedding of the heads of queries and keys, and storing keys and values in a cache by row."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.checks import FLOATS
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays, define_kernel, in_front, unfold_rows
from bijax.dispatch.kernels import backend_of
from bijax.ops.elementwise.call import elementwise
from pallas_kernels.parts.xla.join import halves, join
from pallas_kernels.rotary import portable
from pallas_kernels.rotary.portable import side_by_side as side_by_side


def rotate_heads(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + H/2]) of x (..., N, H) by angles with cos and sin (..., H/2), float32.

    Guarantee: row-invariant; the gradient of x too.

    Example:
        >>> rotate_heads(jnp.array([[1.0, 2.0]]), jnp.zeros(1), jnp.ones(1)).tolist()
        [[-2.0, 1.0]]
    """
    first, second = halves(x)
    cos, sin = (jnp.broadcast_to(a[..., None, :], first.shape) for a in (cos, sin))
    rotated: Arrays = _rotate_pairs(first, second, cos, sin)
    return join(rotated, x.ndim - 1)


def store_rows(stored: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Returns stored (X, Y, ...) with new values for some rows.

    Args:
        stored: X * Y rows.
        rows: (R,) integers, which of these rows; others are dropped.
        new: Rows of any leading dimensions, R in all.

    Example:
        >>> store_rows(jnp.zeros((2, 2)), jnp.array([3, 4]), jnp.array([5.0, 6.0])).tolist()
        [[0.0, 0.0], [0.0, 5.0]]
    """
    flat = stored.reshape(stored.shape[0] * stored.shape[1], *stored.shape[2:])
    new = new.astype(stored.dtype).reshape(rows.size, *stored.shape[2:])
    return flat.at[rows].set(new, mode="drop").reshape(stored.shape)


def rotate_and_store(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    to_rotate: jax.Array | None = None,
    groups: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates queries and keys and stores keys and values, on a GPU in one kernel after the product that makes them.

    Args:
        heads: (B, T, N + 2 * K, H), the heads of queries, keys and values of each token.
        cos: (B, T, H / 2) float32.
        sin: (B, T, H / 2) float32.
        rows: (B * T,) integers, the cache row (of X * Y) of each token; out of range for none. Rows are unique.
        keys: (X, Y, K, H): written in place where it is not used again.
        values: The same.
        to_rotate: (B, T, N + K, H): rotated instead of the queries and keys in `heads`, such as their norms.
        groups: Groups that the heads of a token are in, each with an equal share of queries, keys and values in turn.
            Products whose columns are cut over devices return them so.

    Returns:
        The rotated queries (B, T, N, H), `keys` and `values`.

    Guarantee: row-invariant, with the bits of `rotate_heads` and `store_rows`; the gradients are theirs too.

    Example:
        >>> heads, tables = jnp.ones((1, 1, 3, 2)), (jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
        >>> query, keys, _ = rotate_and_store(heads, *tables, jnp.array([1]), *[jnp.zeros((1, 2, 1, 2))] * 2)
        >>> query.tolist(), keys[0, :, 0].tolist()
        ([[[[-1.0, 1.0]]]], [[0.0, 0.0], [-1.0, 1.0]])
    """
    arrays = heads, cos, sin, rows, keys, values, to_rotate
    given = [x for x in (heads, keys, values, to_rotate) if x is not None]
    one_dtype = len({x.dtype for x in given}) == 1 and heads.dtype.name in FLOATS
    if one_dtype and cos.dtype == sin.dtype == jnp.float32 and all(x.size for x in given):
        return _rotate_and_store(groups, *arrays)
    return rotate_and_store_in_pieces(rotate_heads, side_by_side(heads, keys.shape[2], groups), *arrays[1:])


def rotate_and_store_in_pieces(
    rotate: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    to_rotate: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`rotate_and_store` as a rotation by `rotate` (x, cos, sin) and two calls of `store_rows`."""
    rotated_heads = heads.shape[2] - keys.shape[2]
    query_heads = rotated_heads - keys.shape[2]
    both = rotate(heads[:, :, :rotated_heads] if to_rotate is None else to_rotate, cos, sin)
    stored = store_rows(keys, rows, both[:, :, query_heads:]), store_rows(values, rows, heads[:, :, rotated_heads:])
    return both[:, :, :query_heads], *stored


@custom_vjp(nondiff_argnums=(0,))
def _rotate_and_store(groups: int, *arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    heads, cos, sin, rows, keys, values, to_rotate = arrays
    flat = [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (heads, cos, sin)]
    caches = [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (keys, values)]
    rest = [] if to_rotate is None else [to_rotate.reshape(flat[0].shape[0], *to_rotate.shape[2:])]
    query, *stored = _kernel(
        *flat, rows.astype(jnp.int32), *caches, *rest, **({"groups": groups} if groups > 1 else {})
    )
    keys, values = (x.reshape(keys.shape) for x in stored)
    return query.reshape(*heads.shape[:2], *query.shape[1:]), keys, values


def _forward(groups: int, *arrays: Any) -> tuple[Any, Any]:
    return _rotate_and_store(groups, *arrays), arrays


def _backward(groups: int, saved: Any, cotangents: Any) -> Any:
    def in_pieces(heads: jax.Array, *others: Any) -> Any:
        key_heads = saved[4].shape[2]
        return rotate_and_store_in_pieces(rotate_heads, side_by_side(heads, key_heads, groups), *others)

    _, pull = jax.vjp(in_pieces, *saved)
    return pull(cotangents)


_rotate_and_store.defvjp(_forward, _backward)


@elementwise
def _rotate_pairs(first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array) -> Arrays:
    return portable.rotate_pairs(first, second, cos, sin)


def _shapes(heads: jax.Array, *arrays: jax.Array, **_: Any) -> Arrays:
    keys, values = arrays[3:5]
    return heads[:, : heads.shape[1] - 2 * keys.shape[1]], keys, values


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """More sequences are more tokens, each with the rows of its own part of a larger cache."""
    heads, cos, sin, rows, keys, values, *to_rotate = in_front(size, arrays, axes)
    stored = keys.shape[1]
    inside = (rows >= 0) & (rows < stored)
    rows = jnp.where(inside, rows + stored * jnp.arange(size, dtype=rows.dtype)[:, None], size * stored)
    given = (heads, cos, sin, rows, keys, values, *to_rotate)
    return unfold_rows(size, _kernel(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in given), **parameters))


_kernel = define_kernel("rotate_and_store", backend_of("rotate_and_store", _shapes), _fold, _shapes)
