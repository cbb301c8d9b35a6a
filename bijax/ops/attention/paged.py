"""Attention to paged keys, with the bits of contiguous ones."""

from typing import Final, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from bijax.core.checks import describe, flag, float_array
from bijax.ops._packed import check_packed, find_packed
from bijax.ops._sequences import Names
from bijax.ops.attention._arguments import (
    both,
    check_heads,
    check_pages,
    limits_of,
    narrowed_table,
    paged_numbers,
    scale_factor,
    score_array,
    table_of,
    window_sizes,
)
from bijax.ops.attention._common_prefix import check_common_prefix
from bijax.ops.attention._keywords import PagedKeywords
from bijax.ops.attention._options import keys_and_values, of_heads, soft_cap
from bijax.ops.attention._rule import attend
from pallas_kernels.attention.call import AttentionCall, AttentionOptions

_OP: Final = "bijax.paged_attention"


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[PagedKeywords],
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[PagedKeywords],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[PagedKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    query_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    cu_query_seq_lengths: ArrayLike | None = None,
    max_query_seq_length: int | None = None,
    common_prefix_length: ArrayLike | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `bijax.dot_product_attention` over keys and values in pages, with the same bits.

    With B sequences, T queries, P pages, n entries of a page table, N query heads, K key heads, heads of width H, and
    of width V for the values. Key j of a sequence b is `key_pages[page_table[b, j // page], j % page]`. Pages may have
    any size and order, and several sequences may share one. The keys of the queries themselves are in the cache
    already.

    Args:
        query: (B, T, N, H) float32, bfloat16 or float16, by default the last queries of their sequences; or packed,
            (T, N, H), with `cu_query_seq_lengths`.
        key_pages: (P, page, K, H) of the same dtype, or int8 or float8_e4m3fn; K divides N.
        value_pages: (P, page, K, V) of the dtype of `key_pages`.
        page_table: (B, n) ints in [0, P). Entries that hold no key of the sequence are ignored.
        lengths: int or (B,) ints in [0, n * page], number of keys of each sequence, including the queries' own.
        bias: Floats that are added to the scaled scores, (B or 1, N or 1, T or 1, n * page or 1), the keys in the order
            of their positions; leading dimensions may be missing.
        mask: bool of such a shape; False masks a key.
        scale: Factor of the scores, a Python number; 1 / sqrt(H) by default.
        is_causal: Whether a query sees no key after its own position.
        query_seq_lengths: (B,) ints in [0, T]; later queries see nothing. T by default.
        local_window_size: Keys (before, after) its own position that a query sees at most; an int means both.
        query_offset: int or (B,) ints, absolute position of the first query; `lengths - query_seq_lengths` by
            default.
        logits_soft_cap: Scores are bent to stay below this magnitude, a Python number c: c * tanh(scores / c), after
            the scale and before anything is added.
        sinks: (N,) floats, a score for each head that joins the softmax's denominator and belongs to no key; finite
            or -inf.
        alibi_slopes: (N,) floats: slope * (position of the key - position of the query) is added to the scores. It has
            no gradient.
        key_scale: The scales of int8 or float8_e4m3fn keys, and only for these: (K,), or (K, H) per channel. They are
            multiplied into the queries, and the stored numbers enter the products as they are;
            `pallas_kernels.contract.EightBitContract` has the formulas.
        value_scale: The same for the values, (K,) or (K, V): multiplied into the results, which are rounded before.
        cu_query_seq_lengths: (B + 1,) ints, for packed queries and only for them: cumulative query counts, from 0.
            Queries after the last sequence are padding. They are copied to the padded layout. Excludes a bias, a mask
            and `query_seq_lengths`.
        max_query_seq_length: The largest length of a packed sequence's queries, a Python int. Packed queries whose
            lengths are traced are laid out in this length, T by default.
        common_prefix_length: int or () int in [0, n * page], known or traced: this many keys at the start of every
            sequence, or all keys of a shorter one, are in the pages that the first row of `page_table` lists, as those
            of a prompt that all begin with. It changes no bit. A Hopper GPU reads them once where many sequences decode
            a few queries each ("cascade attention"): the whole splits of 1024 keys among them that every sequence sees,
            without a window or `alibi_slopes`. Elsewhere, and under `vmap`, each sequence reads its own.
        return_residual: Whether to return the log-sum-exp of the scores too, a sink among them.

    Returns:
        The outputs, of the shape of `query` but for V, and its dtype; with `return_residual` also the log-sum-exp
        (B, T, N) or (T, N) in float32. A query that sees no key has zeros and -inf. Where lengths, offsets or pages are
        traced and out of range, or differ from the common prefix, the sequence's results are nan; all results are if
        packed lengths do not add up.

    Raises:
        TypeError: If dtypes are unsupported or differ, or `scale` or `logits_soft_cap` is traced.
        ValueError: If shapes do not fit, if lengths or offsets are out of range (`lengths` below the number of
            queries included) or do not add up, scales are missing or not used, the page table points outside
            the cache, or its rows differ in the common prefix.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant; a row is a query with the keys that it sees. Its bits do not depend on the other
    sequences, the number of queries in the call, or the size, order and content of other pages.

    Source: the paged cache of the project's operator seed, with all heads of a token side by side.

    Example:
        >>> from bijax import dot_product_attention
        >>> k = jax.random.normal(jax.random.key(0), (1, 6, 1, 8))
        >>> q = jax.random.normal(jax.random.key(1), (1, 1, 2, 8))
        >>> pages = k.reshape(3, 2, 1, 8)[::-1]
        >>> paged = paged_attention(q, pages, pages, jnp.array([[2, 1, 0]]), 6)
        >>> bool((paged == dot_product_attention(q, k, k)).all())
        True

        Two sequences that begin with the same page:

        >>> queries, table = jnp.concatenate([q, q]), jnp.array([[2, 1], [2, 0]])
        >>> both = paged_attention(queries, pages, pages, table, 4, common_prefix_length=2)
        >>> bool((both == paged_attention(queries, pages, pages, table, 4)).all())
        True
    """
    query = float_array(_OP, "query", query)
    (key_pages, value_pages), (key_scale, value_scale) = keys_and_values(
        _OP, query, ("key_pages", "value_pages"), (key_pages, value_pages), (key_scale, value_scale)
    )
    came = f"got query {describe(query)}, key_pages {describe(key_pages)} and value_pages {describe(value_pages)}"
    packed = None
    if cu_query_seq_lengths is not None:
        check_packed(_OP, query, {"bias": bias, "mask": mask, "query_seq_lengths": query_seq_lengths})
        names = Names("the lengths of sequences", "cu_query_seq_lengths", "max_query_seq_length")
        packed = find_packed(_OP, "query", query.shape[0], cu_query_seq_lengths, max_query_seq_length, names)
        query, query_seq_lengths = packed.pad(query), packed.lengths
    elif max_query_seq_length is not None:
        raise ValueError(f"{_OP}: max_query_seq_length belongs to packed queries, got it without cu_query_seq_lengths.")
    if not query.ndim == key_pages.ndim == value_pages.ndim == 4:
        raise ValueError(
            f"{_OP}: query must have the dimensions (B, T, N, H), key_pages and value_pages (P, page, K, H), {came}."
        )
    check_heads(_OP, query, key_pages, value_pages, "key_pages", "value_pages")
    batch, length = query.shape[:2]
    number, page = key_pages.shape[:2]
    if page < 1:
        raise ValueError(f"{_OP}: a page must hold at least 1 key, {came}.")
    page_table = table_of(_OP, page_table, batch)
    options = AttentionOptions(
        scale_factor(_OP, scale, query.shape[3]),
        flag(_OP, "is_causal", is_causal),
        window_sizes(_OP, local_window_size),
        soft_cap(_OP, logits_soft_cap),
    )
    capacity = page * page_table.shape[1]
    numbers, valid = paged_numbers(_OP, "keys", lengths, query_seq_lengths, query_offset, batch, length, capacity)
    check_pages(_OP, page_table, numbers.keys, page, number)
    common_prefix, valid_prefix = check_common_prefix(_OP, common_prefix_length, page_table, numbers.keys, page)
    valid = both(valid, valid_prefix)
    sizes = (batch, query.shape[2], length, capacity)
    call = AttentionCall(
        query=query,
        key=key_pages,
        value=value_pages,
        options=options,
        page_table=narrowed_table(page_table),
        bias=score_array(_OP, "bias", bias, sizes, single=False),
        mask=score_array(_OP, "mask", mask, sizes, single=False),
        sinks=of_heads(_OP, "sinks", sinks, query.shape[2]),
        alibi_slopes=of_heads(_OP, "alibi_slopes", alibi_slopes, query.shape[2]),
        key_scale=key_scale,
        value_scale=value_scale,
        common_prefix=common_prefix,
        limits=limits_of(*numbers),
    )
    out, lse = attend(call, valid, _OP)
    if packed is not None:
        out, lse = packed.unpad(out), packed.unpad(lse, -jnp.inf)
    return (out, lse) if flag(_OP, "return_residual", return_residual) else out
