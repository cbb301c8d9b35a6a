"""Attention by the names and arguments of an engine's operators: whole sequences, and contiguous caches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from bijax.core.checks import describe, float_array, integer, integer_array, same_dtype
from bijax.core.explicit_axes import gathered_once
from bijax.ops._engine_arguments import check_known, check_shape, narrowed
from bijax.ops.attention.dot_product import dot_product_attention


def flash_attention(
    q: ArrayLike | None = None,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    *,
    qkv: ArrayLike | None = None,
    q_head_num: int | None = None,
    kv_head_num: int | None = None,
    is_causal: bool = True,
) -> jax.Array:
    """Attends within sequences: `bijax.dot_product_attention` of queries, keys and values, separate or in one array.

    Args:
        q: (B, L, q_head_num, D) float32, bfloat16 or float16; with `k` and `v`, or `qkv` instead of all three.
        k: (B, L, kv_head_num, D); kv_head_num divides q_head_num.
        v: Of the shape and dtype of `k`.
        qkv: (B, L, q_head_num + 2 * kv_head_num, D): the heads of queries, keys and values.
        q_head_num: Heads of queries in `qkv`.
        kv_head_num: Heads of keys, and of values, in `qkv`.
        is_causal: Whether a query is masked from later keys.

    Returns:
        (B, L, q_head_num, D) of the dtype of the queries.

    Raises:
        TypeError: If dtypes are unsupported or differ.
        ValueError: If the shapes do not fit, or not exactly one of `qkv` and `q`, `k`, `v` is passed.

    Guarantee: row-invariant, and the gradients too, as `bijax.dot_product_attention`.

    Source: "flash_attention" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> qkv = jax.random.normal(jax.random.key(0), (1, 5, 4, 8))
        >>> y = flash_attention(qkv=qkv, q_head_num=2, kv_head_num=1)
        >>> bool((y == dot_product_attention(qkv[:, :, :2], qkv[:, :, 2:3], qkv[:, :, 3:], is_causal=True)).all())
        True
    """
    q, k, v = _heads("bijax.flash_attention", q, k, v, qkv, q_head_num, kv_head_num)
    return dot_product_attention(q, k, v, is_causal=is_causal)


def flash_decoding(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    q: ArrayLike | None = None,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    *,
    qkv: ArrayLike | None = None,
    q_head_num: int | None = None,
    kv_head_num: int | None = None,
    kv_lens: ArrayLike,
) -> jax.Array:
    """Attends from one new token of each sequence to itself and to the tokens before it, which are in a cache.

    Sequence b has slot b of the cache. The caches are read only: `bijax.store_kv_cache` writes the new token.

    Args:
        k_cache: (slots, kv_head_num, S, D) of the dtype of the queries, as many slots as sequences or more.
        v_cache: Of the shape and dtype of `k_cache`.
        q: (B, 1, q_head_num, D) float32, bfloat16 or float16; with `k` and `v`, or `qkv` instead of all three.
        k: (B, 1, kv_head_num, D), the keys of the new tokens.
        v: Of the shape and dtype of `k`.
        qkv: (B, 1, q_head_num + 2 * kv_head_num, D): the heads of queries, keys and values.
        q_head_num: Heads of queries in `qkv`.
        kv_head_num: Heads of keys, and of values, in `qkv`.
        kv_lens: int in [0, S], tokens of every sequence in the cache.

    Returns:
        (B, 1, q_head_num, D) of the dtype of the queries. If `kv_lens` is traced and out of range, nan.

    Raises:
        TypeError: If dtypes are unsupported or differ, or `kv_lens` is not an integer.
        ValueError: If the shapes do not fit, `kv_lens` is out of range, or not exactly one of `qkv` and `q`, `k`, `v`
            is given.

    Guarantee: row-invariant: the bits of `flash_attention` of the whole sequence at its last token.

    Source: "flash_decoding" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> qkv = jax.random.normal(jax.random.key(0), (1, 5, 4, 8))
        >>> k_cache, v_cache = qkv[:, :, 2:3].swapaxes(1, 2), qkv[:, :, 3:].swapaxes(1, 2)
        >>> y = flash_decoding(k_cache, v_cache, qkv=qkv[:, 4:], q_head_num=2, kv_head_num=1, kv_lens=4)
        >>> bool((y == flash_attention(qkv=qkv, q_head_num=2, kv_head_num=1)[:, 4:]).all())
        True
    """
    op = "bijax.flash_decoding"
    q, k, v = _heads(op, q, k, v, qkv, q_head_num, kv_head_num)
    caches = float_array(op, "k_cache", k_cache), float_array(op, "v_cache", v_cache)
    same_dtype(op, q=q, k=k, v=v, k_cache=caches[0], v_cache=caches[1])
    (batch, length, _, width), (heads, slots) = q.shape, (k.shape[2], caches[0].shape[:1])
    sizes: dict[str, int] = {}
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        check_shape(op, name, cache, ("slots", heads, "S", width), sizes)
    if length != 1 or slots[0] < batch:
        raise ValueError(
            f"{op}: expected one new token of each sequence and a slot for each, got q {describe(q)} and k_cache"
            f" {describe(caches[0])}."
        )
    past = integer_array(op, "kv_lens", kv_lens)
    check_shape(op, "kv_lens", past, (), {})
    check_known(op, "kv_lens", past, 0, sizes["S"], "the tokens that a slot holds")
    start = narrowed(past, 0, sizes["S"])
    keys, values = (_appended(jnp.swapaxes(c[:batch], 1, 2), new, start) for c, new in zip(caches, (k, v), strict=True))
    lengths = jnp.broadcast_to(jnp.where(start < 0, -1, start + 1), (batch,))
    return dot_product_attention(
        q, keys, values, is_causal=True, query_offset=jnp.maximum(lengths - 1, 0), key_value_seq_lengths=lengths
    )


def _appended(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Returns the cache (B, S + 1, K, D) with a token after the first `start`."""
    longer = jnp.pad(cache, ((0, 0), (0, 1), (0, 0), (0, 0)))
    return longer.at[:, start].set(new[:, 0])


def _heads(
    op: str, q: Any, k: Any, v: Any, qkv: Any, q_head_num: Any, kv_head_num: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    given = [n for n, x in (("q", q), ("k", k), ("v", v), ("qkv", qkv)) if x is not None]
    if given not in (["q", "k", "v"], ["qkv"]):
        raise ValueError(f"{op}: expected either qkv, or q, k and v, got {' and '.join(given) or 'none of them'}.")
    numbers = q_head_num, kv_head_num
    if qkv is None:
        if numbers != (None, None):
            raise ValueError(f"{op}: q_head_num and kv_head_num belong to qkv, got them together with q, k and v.")
        arrays = [float_array(op, n, x) for n, x in zip(("q", "k", "v"), gathered_once(q, k, v), strict=True)]
        if any(x.ndim != 4 for x in arrays) or len({x.shape[:2] for x in arrays}) > 1:
            came = ", ".join(f"{n} {describe(x)}" for n, x in zip(("q", "k", "v"), arrays, strict=True))
            raise ValueError(
                f"{op}: q, k and v must have the dimensions (B, L, heads, D) with one B and L, got {came}."
            )
        return arrays[0], arrays[1], arrays[2]
    array = float_array(op, "qkv", qkv)
    if None in numbers:
        raise ValueError(f"{op}: qkv needs q_head_num and kv_head_num, got {q_head_num} and {kv_head_num}.")
    queries, keys = integer(op, "q_head_num", q_head_num), integer(op, "kv_head_num", kv_head_num)
    if array.ndim != 4 or min(queries, keys) < 1 or array.shape[2] != queries + 2 * keys:
        raise ValueError(
            f"{op}: qkv must have the shape (B, L, q_head_num + 2 * kv_head_num, D), got {queries} + 2 * {keys} heads"
            f" and {describe(array)}."
        )
    return array[:, :, :queries], array[:, :, queries : queries + keys], array[:, :, queries + keys :]
