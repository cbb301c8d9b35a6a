"""Rotary position embedding of the queries and keys in a packed projection."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from bijax.core.checks import describe, flag, float_array, integer, integer_array
from bijax.core.derivative import custom_vjp
from bijax.core.partitioning import whole_array
from bijax.core.primitive import Arrays, define_kernel, in_front
from bijax.dispatch.kernels import backend_of
from bijax.ops._engine_arguments import check_known, check_shape, narrowed
from bijax.ops._sequences import locate_tokens

_OP = "bijax.rotary_embedding"


def rotary_embedding(
    qkv: ArrayLike,
    sin: ArrayLike,
    cos: ArrayLike,
    *,
    q_head_num: int,
    kv_head_num: int,
    position_ids: ArrayLike | None = None,
    q_lens: ArrayLike | None = None,
    accum_q_len: ArrayLike | None = None,
    max_q_len: int | None = None,
    rope_offset: int = 0,
    interleaved: bool = False,
) -> jax.Array:
    """Rotates the columns [rope_offset, rope_offset + rope_dim) of each query and key by the angle of its position.

    A column x with its partner p becomes x * cos ∓ p * sin, with sin and cos of the position and of that column, and
    minus for the first one of a pair. It is computed in float32, both products rounded, and rounded once more to the
    dtype of `qkv`. Values, other columns and padding stay as they are. Where `qkv` is not used again, XLA writes the
    result in its place.

    Args:
        qkv: (B, L, H, D), padded, or (T, H, D), packed, float32, bfloat16 or float16, with H = q_head_num +
            2 * kv_head_num heads: queries, keys and values.
        sin: (positions, rope_dim) of any of these dtypes, rope_dim even and rope_offset + rope_dim at most D. A
            constant: no gradient flows to it.
        cos: Of the shape of `sin`.
        q_head_num: Heads of queries.
        kv_head_num: Heads of keys, and of values.
        position_ids: (B,) ints, the position of the first token of each sequence; 0 by default.
        q_lens: (B,) ints, the tokens of each sequence; by default L, or the differences of `accum_q_len`. Packed tokens
            after the last sequence are padding.
        accum_q_len: (B + 1,) ints, for packed tokens: cumulative token counts, from 0; the running sums of `q_lens` by
            default.
        max_q_len: The largest length allowed in `q_lens`.
        rope_offset: First column that is rotated.
        interleaved: Whether pairs are neighbours, columns 2i and 2i + 1, rather than halves, i and i + rope_dim / 2.

    Returns:
        An array of the shape and dtype of `qkv`. Where positions or lengths are traced and out of range, the tokens'
        queries and keys are nan in the rotated columns.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If the shapes do not fit, or known positions or lengths are out of range or contradict each other.

    Guarantee: row-invariant (a row is one head of one token), packed or padded; the gradient of `qkv` too.

    Source: "rotary_embedding" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> qkv = jnp.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])  # one token: a query, a key and a value
        >>> sin, cos = jnp.array([[0.0, 0.0], [1.0, 1.0]]), jnp.array([[1.0, 1.0], [0.0, 0.0]])
        >>> options = {"q_head_num": 1, "kv_head_num": 1, "q_lens": [1]}
        >>> rotary_embedding(qkv, sin, cos, position_ids=[1], **options).tolist()
        [[[-2.0, 1.0], [-4.0, 3.0], [5.0, 6.0]]]
    """
    qkv, sin, cos = float_array(_OP, "qkv", qkv), float_array(_OP, "sin", sin), float_array(_OP, "cos", cos)
    interleaved = flag(_OP, "interleaved", interleaved)
    heads, offset = _rotated(qkv, sin, cos, q_head_num, kv_head_num, rope_offset)
    positions, dim = sin.shape
    tokens = locate_tokens(_OP, qkv.shape[:-2], q_lens, accum_q_len, max_q_len, name="qkv")
    batch = len(tokens.lengths)
    first = integer_array(_OP, "position_ids", [0] * batch if position_ids is None else position_ids)
    check_shape(_OP, "position_ids", first, (batch,), {})
    check_known(_OP, "position_ids", first, 0, positions, "the positions of sin and cos")
    if tokens.known:
        check_known(_OP, "position_ids + q_lens", first + tokens.lengths, 0, positions, "the positions of sin and cos")
    start = tokens.of_tokens(narrowed(first, 0, positions), -1)
    position = start + tokens.index
    right = (start >= 0) & (position < positions) & tokens.of_tokens(tokens.valid, False)

    at = (*[0] * (qkv.ndim - 2), 0, offset)
    tables = (_rows_of(lax.stop_gradient(t), position, right) for t in (sin, cos))
    if dim == qkv.shape[-1]:
        # Values are passed by rather than cut off, which XLA does in the same pass over memory.
        kept = tokens.padding[..., None, None] | (lax.iota(jnp.int32, qkv.shape[-2]) >= heads)[:, None]
        return _rotate(qkv, *tables, kept, interleaved)
    x = lax.slice(qkv, at, (*qkv.shape[:-2], heads, offset + dim))
    y = _rotate(x, *tables, tokens.padding[..., None, None], interleaved)
    return lax.dynamic_update_slice(qkv, y, [jnp.int32(i) for i in at])


def _rotated(
    qkv: jax.Array, sin: jax.Array, cos: jax.Array, q_head_num: int, kv_head_num: int, rope_offset: int
) -> tuple[int, int]:
    """Checks the shapes; returns the number of rotated heads and the first rotated column."""
    queries, keys = (integer(_OP, n, x) for n, x in (("q_head_num", q_head_num), ("kv_head_num", kv_head_num)))
    offset = integer(_OP, "rope_offset", rope_offset)
    if qkv.ndim not in (3, 4):
        raise ValueError(f"{_OP}: qkv must have the dimensions (B, L, H, D) or (T, H, D), got {describe(qkv)}.")
    if queries < 0 or keys < 0 or queries + 2 * keys != qkv.shape[-2]:
        raise ValueError(
            f"{_OP}: qkv must have q_head_num + 2 * kv_head_num heads, got {queries} + 2 * {keys} and qkv"
            f" {describe(qkv)}."
        )
    sizes: dict[str, int] = {}
    check_shape(_OP, "sin", sin, ("positions", "rope_dim"), sizes)
    check_shape(_OP, "cos", cos, ("positions", "rope_dim"), sizes)
    dim = sin.shape[1]
    if dim % 2 or offset < 0 or offset + dim > qkv.shape[-1]:
        raise ValueError(
            f"{_OP}: rope_dim must be even and the columns [rope_offset, rope_offset + rope_dim) lie in a head, got"
            f" rope_offset={offset}, sin {describe(sin)} and qkv {describe(qkv)}."
        )
    return queries + keys, offset


def _rows_of(table: jax.Array, position: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the rows of a table by position, nan where missing, with one dimension for the heads."""
    if table.shape[0] == 0:
        return jnp.full((*position.shape, 1, table.shape[1]), jnp.nan, table.dtype)
    rows = jnp.take(whole_array(table), jnp.where(right, position, 0), axis=0, mode="clip")
    return jnp.where(right[..., None], rows, jnp.asarray(jnp.nan, table.dtype))[..., None, :]


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    return _kernel(*in_front(size, arrays, axes), **parameters)


def _shapes(x: jax.Array, *_: jax.Array, **__: Any) -> Arrays:
    return (x,)


_kernel = define_kernel("rotate", backend_of("rotate", _shapes), _fold, _shapes)


@custom_vjp(nondiff_argnums=(4,))
def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array, kept: jax.Array, interleaved: bool) -> jax.Array:
    """Rotates the columns that are not passed through."""
    return jnp.where(kept, x, _kernel(x, sin, cos, interleaved=interleaved, inverse=False)[0])


def _forward(x: jax.Array, sin: jax.Array, cos: jax.Array, kept: jax.Array, interleaved: bool) -> tuple[jax.Array, Any]:
    return _rotate(x, sin, cos, kept, interleaved), (sin, cos, kept)


def _backward(interleaved: bool, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    *tables, kept = saved
    dx = jnp.where(kept, g, _kernel(g, *tables, interleaved=interleaved, inverse=True)[0])
    return dx, jnp.zeros_like(tables[0]), jnp.zeros_like(tables[1]), None


_rotate.defvjp(_forward, _backward)
