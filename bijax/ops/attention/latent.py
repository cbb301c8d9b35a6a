"""Latent attention: all query heads read one array of latents, whose first columns are the values too."""

from typing import Any, Final

import jax
from jax.typing import ArrayLike

from bijax.core.checks import describe, flag, float_array, integer
from bijax.ops.attention._arguments import (
    LAST_POSITION,
    both,
    check_pages,
    limits_of,
    narrowed_table,
    paged_numbers,
    per_sequence,
    scale_factor,
    table_of,
)
from bijax.ops.attention._options import check_scale, column_scales, stored_array
from bijax.ops.attention._rule import attend
from pallas_kernels.attention.call import AttentionCall, AttentionOptions

_OP: Final = "bijax.latent_attention"
_PAGED: Final = "bijax.paged_latent_attention"


def latent_attention(
    query: ArrayLike,
    latents: ArrayLike,
    *,
    value_size: int,
    scale: float,
    is_causal: bool = True,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    latent_scale: ArrayLike | None = None,
) -> jax.Array:
    """Computes softmax(scale * query @ latents^T) @ latents[:, :value_size] for each head.

    With B sequences, T queries, S latents, N query heads, latents of width W and values of width V. This is
    `bijax.dot_product_attention` with one key head, whose values are not an array of their own: a kernel reads each
    latent once. It is the attention of DeepSeek-V2 and V3 ("MLA") in its absorbed form: W is 512 + 64, a compressed key
    and value and a part that is rotated, and V is 512; the projections of keys are multiplied into the queries, those
    of values into the results. Prompts are computed in the same form as single tokens, since expanded keys and values
    would give different bits.

    Latents are processed in blocks at absolute positions, under the contracts of `dot_product_attention`: on a GPU
    from Ampere on by Triton (`pallas_kernels.contract.MmaAttentionContract`), for latents of at most 576 columns. On
    Hopper, latents of 512 + 64 columns of 16 bits have a kernel of their own, with the same bits.

    Args:
        query: (B, T, N, W) float32, bfloat16 or float16.
        latents: (B, S, W) of the same dtype, or int8 or float8_e4m3fn.
        value_size: V, the number of leading columns of a latent that are its value, from 1 to W.
        scale: Factor of the scores, a Python number. There is no default: the width of the heads before absorption
            determines it.
        is_causal: Whether a query sees no latent after its own position.
        query_seq_lengths: (B,) ints in [0, T]; later queries see nothing. T by default.
        key_value_seq_lengths: (B,) ints in [0, S]; later latents are seen by no query. S by default.
        query_offset: int or (B,) ints, absolute position of the first query; query i sits at `query_offset + i`, latent
            j at j. 0 by default.
        latent_scale: The scale of int8 or float8_e4m3fn latents, and only for these: () or, for each column, (W,). It
            is multiplied into the queries and, for the columns that are values, into the results, which are rounded
            before (`pallas_kernels.contract.EightBitContract`).

    Returns:
        (B, T, N, V) in the dtype of `query`. A query that sees no latent has zeros. Where lengths or offsets are traced
        and out of range, the sequence's results are nan.

    Raises:
        TypeError: If dtypes are unsupported or differ, `value_size` is not an int, or `scale` is traced.
        ValueError: If shapes do not fit, a number is out of range, or the scale of latents is missing or not used.
        UnsupportedError: If latents of 8 bits are differentiated; on a GPU if latents have more than 576 columns.

    Guarantee: row-invariant; a row is a query with the latents that it sees. Its bits do not depend on the other
    sequences, the number of queries in the call, S, or whether the latents lie in one piece or in pages
    (`bijax.paged_latent_attention`). So is the gradient of the queries; the gradient of latents depends on their own
    sequence alone, and is the sum of what they get as keys and as values, each rounded.

    Source: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, 2024, section 2.1; absorption, its appendix C.

    Example:
        >>> q, c = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(1, 5, 4, 24), (1, 5, 24)]))
        >>> prompt = latent_attention(q, c, value_size=16, scale=0.2)
        >>> prompt.shape
        (1, 5, 4, 16)
        >>> token = latent_attention(q[:, 4:], c, value_size=16, scale=0.2, query_offset=4)
        >>> bool((token == prompt[:, 4:]).all())
        True
    """
    query = _query(_OP, query)
    key, factors = _latents(_OP, "latents", query, latents, latent_scale, "(B, S, W)")
    batch, length = query.shape[:2]
    if key.shape[0] != batch:
        raise ValueError(
            f"{_OP}: query and latents must hold as many sequences (first dimension), got query {describe(query)} and"
            f" latents of {key.shape[0]} sequences."
        )
    options = _options(_OP, key, value_size, scale, is_causal)
    offsets, valid_offsets = per_sequence(
        _OP, "query_offset", 0 if query_offset is None else query_offset, batch, LAST_POSITION, "the last position"
    )
    query_lengths, valid_queries = per_sequence(
        _OP, "query_seq_lengths", query_seq_lengths, batch, length, "the queries given, T"
    )
    key_lengths, valid_keys = per_sequence(
        _OP, "key_value_seq_lengths", key_value_seq_lengths, batch, key.shape[1], "the latents given, S"
    )
    call = _call(query, key, options, factors, limits=limits_of(offsets, query_lengths, key_lengths))
    return attend(call, both(valid_offsets, both(valid_queries, valid_keys)), _OP)[0]


def paged_latent_attention(
    query: ArrayLike,
    latent_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    value_size: int,
    scale: float,
    is_causal: bool = True,
    query_seq_lengths: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    latent_scale: ArrayLike | None = None,
) -> jax.Array:
    """Computes `bijax.latent_attention` over latents in pages, with the same bits.

    With P pages and n entries of a page table; latent j of a sequence b is `latent_pages[page_table[b, j // page],
    j % page]`. The latents of the queries themselves are in the cache already.

    Args:
        query: (B, T, N, W) float32, bfloat16 or float16, by default the last queries of their sequences.
        latent_pages: (P, page, W) of the same dtype, or int8 or float8_e4m3fn.
        page_table: (B, n) ints in [0, P). Entries that hold no latent of the sequence are ignored.
        lengths: int or (B,) ints in [0, n * page], latents of each sequence, including the queries' own.
        value_size: As for `bijax.latent_attention`.
        scale: The same.
        is_causal: The same.
        query_seq_lengths: The same.
        query_offset: int or (B,) ints, absolute position of the first query; `lengths - query_seq_lengths` by default.
        latent_scale: The same.

    Returns:
        As `bijax.latent_attention`; results are also nan where pages are traced and out of range.

    Raises:
        TypeError: As `bijax.latent_attention`.
        ValueError: The same; also if the page table points outside of the cache.
        UnsupportedError: In differentiation; on a GPU if latents have more than 576 columns.

    Guarantee: row-invariant; a row is a query with the latents that it sees. Its bits do not depend on the other
    sequences, the number of queries in the call, or the size, order and content of other pages.

    Source: as `bijax.latent_attention`.

    Example:
        >>> q, c = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(1, 2, 4, 24), (1, 6, 24)]))
        >>> pages = c.reshape(3, 2, 24)[::-1]
        >>> paged = paged_latent_attention(q, pages, [[2, 1, 0]], 6, value_size=16, scale=0.2)
        >>> bool((paged == latent_attention(q, c, value_size=16, scale=0.2, query_offset=4)).all())
        True
    """
    query = _query(_PAGED, query)
    key, factors = _latents(_PAGED, "latent_pages", query, latent_pages, latent_scale, "(P, page, W)")
    batch, length = query.shape[:2]
    number, page = key.shape[:2]
    if page < 1:
        raise ValueError(f"{_PAGED}: a page must hold at least 1 latent, got latent_pages of {page} each.")
    table = table_of(_PAGED, page_table, batch)
    options = _options(_PAGED, key, value_size, scale, is_causal)
    numbers, valid = paged_numbers(
        _PAGED, "latents", lengths, query_seq_lengths, query_offset, batch, length, page * table.shape[1]
    )
    check_pages(_PAGED, table, numbers.keys, page, number)
    call = _call(query, key, options, factors, limits=limits_of(*numbers), page_table=narrowed_table(table))
    return attend(call, valid, _PAGED)[0]


def _query(op: str, given: Any) -> jax.Array:
    query = float_array(op, "query", given)
    if query.ndim != 4:
        raise ValueError(f"{op}: query must have the dimensions (B, T, N, W), got {describe(query)}.")
    if query.shape[2] < 1:
        raise ValueError(f"{op}: query must have at least one head, got {describe(query)}.")
    return query


def _latents(
    op: str, name: str, query: jax.Array, given: Any, scale: Any, dims: str
) -> tuple[jax.Array, jax.Array | None]:
    """Returns latents as keys of one head, and their scales (1, 1, W or 1) if they have 8 bits."""
    array = stored_array(op, query, name, given, "latent_scale")
    if array.ndim != 3 or array.shape[2] != query.shape[3] or array.shape[2] < 1:
        raise ValueError(
            f"{op}: {name} must have the dimensions {dims}, with the width W of the queries, at least 1, got"
            f" {describe(array)} and query {describe(query)}."
        )
    check_scale(op, name, array, "latent_scale", scale)
    if scale is None:
        return array[:, :, None], None
    return array[:, :, None], column_scales(op, name, scale, array.shape[2]).reshape(1, 1, -1)


def _options(op: str, key: jax.Array, value_size: Any, scale: Any, is_causal: Any) -> AttentionOptions:
    width = key.shape[3]
    size = integer(op, "value_size", value_size)
    if not 1 <= size <= width:
        raise ValueError(f"{op}: value_size must be in [1, {width}], the width W of a latent, got {size}.")
    if scale is None:
        raise TypeError(f"{op}: scale must be a number, got None; the width of a latent does not determine it.")
    factor = scale_factor(op, scale, width)
    return AttentionOptions(factor, flag(op, "is_causal", is_causal), latent_value_size=size)


def _call(
    query: jax.Array, key: jax.Array, options: AttentionOptions, factors: jax.Array | None, **arrays: Any
) -> AttentionCall:
    of_values = factors if factors is None or factors.shape[2] == 1 else factors[..., : options.latent_value_size]
    return AttentionCall(
        query=query, key=key, value=None, options=options, key_scale=factors, value_scale=of_values, **arrays
    )
