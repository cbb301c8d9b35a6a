"""Attention to caches in blocks by the names and arguments of an engine's operators: prefill and decode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from bijax.core.checks import describe, float_array, integer_array
from bijax.core.partitioning import whole_array
from bijax.ops._engine_arguments import cache_scale, check_known, check_shape, is_known, narrowed
from bijax.ops._sequences import Tokens, locate_tokens
from bijax.ops.attention._options import QUANTISED
from bijax.ops.attention.paged import paged_attention


def flash_attention_prefill(
    q: ArrayLike,
    block_table: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    q_lens: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    kv_ids: ArrayLike | None = None,
    accum_q_len: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    max_q_len: int | None = None,
) -> jax.Array:
    """Attends from new tokens of sequences to themselves and to the tokens before them, all of them in a cache.

    Token i of sequence b is token kv_lens[b] + i of its slot, and sees the tokens up to itself. Keys and values of the
    new tokens have been written by `bijax.store_paged_kv_cache`. A cache of int8 or float8_e4m3fn holds
    round(key / k_scale); attention uses its product with k_scale, computed in float32 and rounded to the dtype of `q`,
    block by block.

    Args:
        q: (T, N, D), packed, sequence after sequence, or (B, L, N, D), padded; float32, bfloat16 or float16.
        block_table: (slots, blocks of a slot) ints in [0, blocks). Entries that hold no token are ignored.
        k_cache: (blocks, K, size, D) of the dtype of `q`, or int8 or float8_e4m3fn; K divides N.
        v_cache: Of the shape and dtype of `k_cache`.
        q_lens: (B,) ints, the new tokens of each sequence; by default L, or the differences of `accum_q_len`.
        kv_lens: (B,) ints, the tokens that each slot had before; 0 by default.
        kv_ids: (B,) ints, the slot of each sequence; 0, 1, 2, ... by default.
        accum_q_len: (B + 1,) ints, for packed tokens: cumulative token counts, from 0; the running sums of `q_lens` by
            default.
        k_scale: (K, D), or (K,) for one scale per head, of a floating dtype; for 8-bit caches only.
        v_scale: As `k_scale`, for the values.
        max_q_len: The largest length allowed in `q_lens`. Packed tokens whose lengths are traced are padded to it.

    Returns:
        An array of the shape and dtype of `q`; zeros for padding. Where lengths, slots or blocks are traced and out of
        range, the sequence's results are nan.

    Raises:
        TypeError: If a dtype is unsupported, or the dtypes of `q` and caches differ.
        ValueError: If the shapes do not fit, scales are missing or not used, or known numbers are out of range.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: a token's bits are those of `flash_attention_decode`, whatever the chunks, the blocks and
    the other sequences.

    Source: "flash_attention_prefill" of xpu-perf (https://github.com/bytedance/xpu-perf), with the table of
    "store_paged_kv_cache".

    Example:
        >>> from bijax.ops.attention.dot_product import dot_product_attention
        >>> x = jax.random.normal(jax.random.key(0), (6, 1, 8))
        >>> cache = x.reshape(3, 2, 1, 8).swapaxes(1, 2)
        >>> y = flash_attention_prefill(x[3:], [[0, 1, 2]], cache, cache, q_lens=[3], kv_lens=[3])
        >>> bool((y == dot_product_attention(x, x, x, is_causal=True)[3:]).all())
        True
    """
    lengths = {"q_lens": q_lens, "accum_q_len": accum_q_len, "max_q_len": max_q_len}
    places = {"kv_ids": kv_ids, "kv_lens": kv_lens}
    return _attend(
        "bijax.flash_attention_prefill", q, block_table, (k_cache, v_cache), lengths, places, (k_scale, v_scale)
    )


def flash_attention_decode(
    q: ArrayLike,
    block_table: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    kv_lens: ArrayLike,
    q_lens: ArrayLike | None = None,
    kv_ids: ArrayLike | None = None,
    accum_q_len: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    q_seq_len: int | None = None,
) -> jax.Array:
    """Attends from the last token of each sequence, or its last few; otherwise as `bijax.flash_attention_prefill`.

    Args:
        q: (B, q_seq_len, N, D), padded, or (T, N, D), packed; float32, bfloat16 or float16.
        block_table: (slots, blocks of a slot) ints in [0, blocks).
        k_cache: (blocks, K, size, D) of the dtype of `q`, or int8 or float8_e4m3fn; K divides N.
        v_cache: Of the shape and dtype of `k_cache`.
        kv_lens: (B,) ints, the tokens that each slot had before those of `q`.
        q_lens: (B,) ints, the tokens of each sequence; q_seq_len by default, or the differences of `accum_q_len`.
        kv_ids: (B,) ints, the slot of each sequence; 0, 1, 2, ... by default.
        accum_q_len: (B + 1,) ints, for packed tokens; the running sums of `q_lens` by default.
        k_scale: (K, D), or (K,) for one scale per head, of a floating dtype; for 8-bit caches only.
        v_scale: As `k_scale`, for the values.
        q_seq_len: The largest number of tokens of a sequence.

    Returns:
        An array of the shape and dtype of `q`; zeros for padding. Where lengths, slots or blocks are traced and out of
        range, the sequence's results are nan.

    Raises:
        TypeError: If a dtype is unsupported, or the dtypes of `q` and caches differ.
        ValueError: If the shapes do not fit, scales are missing or not used, or known numbers are out of range.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: a token's bits are those of `flash_attention_prefill`.

    Source: "flash_attention_decode" of xpu-perf (https://github.com/bytedance/xpu-perf), with the table of
    "store_paged_kv_cache".

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (6, 1, 8))
        >>> cache = x.reshape(3, 2, 1, 8).swapaxes(1, 2)
        >>> last = flash_attention_decode(x[None, 5:], [[0, 1, 2]], cache, cache, kv_lens=[5])
        >>> bool((last[0] == flash_attention_prefill(x, [[0, 1, 2]], cache, cache, q_lens=[6])[5:]).all())
        True
    """
    lengths = {"q_lens": q_lens, "accum_q_len": accum_q_len, "max_q_len": q_seq_len}
    places = {"kv_ids": kv_ids, "kv_lens": kv_lens}
    return _attend(
        "bijax.flash_attention_decode", q, block_table, (k_cache, v_cache), lengths, places, (k_scale, v_scale)
    )


def _attend(
    op: str,
    q: Any,
    block_table: Any,
    given: tuple[Any, Any],
    lengths: dict[str, Any],
    places: dict[str, Any],
    scales: tuple[Any, Any],
) -> jax.Array:
    q = float_array(op, "q", q)
    if q.ndim not in (3, 4):
        raise ValueError(f"{op}: q must have the dimensions (T, N, D) or (B, L, N, D), got {describe(q)}.")
    caches = _caches(op, q, given, scales)
    tokens = locate_tokens(op, q.shape[:-2], **lengths, name="q")
    table = integer_array(op, "block_table", block_table)
    check_shape(op, "block_table", table, ("slots", "blocks of a slot"), {})
    pages, past, total = _pages(op, tokens, table, caches[0].shape[2], **places)
    padded = q if q.ndim == 4 else _pad(q, tokens, lengths["max_q_len"])
    key_pages, value_pages = (jnp.swapaxes(c, 1, 2) for c in caches)
    y = paged_attention(
        padded,
        key_pages,
        value_pages,
        pages,
        total,
        query_offset=past,
        query_seq_lengths=tokens.lengths,
        key_scale=scales[0],
        value_scale=scales[1],
    )
    if q.ndim == 3:
        if 0 in y.shape[:2]:
            return jnp.zeros_like(q)
        y = whole_array(y).at[tokens.sequence, tokens.index].get(mode="clip")
    return jnp.where(tokens.padding[..., None, None], jnp.zeros((), y.dtype), y)


def _pages(op: str, tokens: Tokens, table: Any, size: int, kv_ids: Any, kv_lens: Any) -> tuple[Any, Any, Any]:
    """Returns the blocks (B, n), the past and total tokens (B,) of each sequence; -1 where invalid."""
    batch, (slots, number) = len(tokens.lengths), table.shape
    ids = integer_array(op, "kv_ids", np.arange(batch, dtype=np.int32) if kv_ids is None else kv_ids)
    past = integer_array(op, "kv_lens", np.zeros(batch, np.int32) if kv_lens is None else kv_lens)
    for name, numbers in (("kv_ids", ids), ("kv_lens", past)):
        check_shape(op, name, numbers, (batch,), {})
    check_known(op, "kv_ids", ids, 0, slots - 1, "the slots of block_table")
    check_known(op, "kv_lens", past, 0, number * size, "the tokens that a slot holds")
    if is_known(table, ids, past, tokens.lengths):
        return table[ids], past, past + tokens.lengths
    slot, start = narrowed(ids, 0, slots - 1), narrowed(past, 0, number * size)
    right = tokens.valid & (slot >= 0) & (start >= 0)
    total = jnp.where(right, start + tokens.lengths, -1)
    return jnp.asarray(table)[jnp.maximum(slot, 0)], jnp.maximum(start, 0), total


def _pad(q: jax.Array, tokens: Tokens, longest: int | None) -> jax.Array:
    """Returns packed tokens (T, N, D) as (B, L, N, D), with zeros after each sequence."""
    length = int(tokens.lengths.max(initial=0)) if tokens.known else min(q.shape[0], longest or q.shape[0])
    padded = jnp.zeros((len(tokens.lengths), length, *q.shape[1:]), q.dtype)
    # Tokens of no sequence have an index past the end.
    index = jnp.where(tokens.inside, tokens.index, length)
    return padded.at[tokens.sequence, index].set(q, mode="drop")


def _caches(op: str, q: jax.Array, given: tuple[Any, Any], scales: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    sizes: dict[str, int] = {"D": q.shape[-1]}
    for name, cache, factor in zip(("k", "v"), given, scales, strict=True):
        dtype = getattr(cache, "dtype", None)
        if dtype is None or (jnp.dtype(dtype) != q.dtype and str(dtype) not in QUANTISED):
            came = type(cache).__name__ if dtype is None else describe(cache)
            raise TypeError(
                f"{op}: {name}_cache must be {' or '.join(QUANTISED)} or of the dtype of q {describe(q)}, got {came}."
            )
        check_shape(op, f"{name}_cache", cache, ("blocks", "K", "size", "D"), sizes)
        if (factor is None) == (str(dtype) in QUANTISED):
            raise ValueError(
                f"{op}: {name}_scale is needed for a cache of {' or '.join(QUANTISED)} and belongs to no other, got"
                f" {'none' if factor is None else 'one'} with {name}_cache {describe(cache)}."
            )
        if factor is not None:
            cache_scale(op, f"{name}_scale", factor, sizes)
    if given[0].dtype != given[1].dtype:
        raise TypeError(
            f"{op}: k_cache and v_cache must share one dtype, got {describe(given[0])}, {describe(given[1])}."
        )
    return jnp.asarray(given[0]), jnp.asarray(given[1])
