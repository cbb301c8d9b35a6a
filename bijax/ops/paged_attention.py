"""Attention to keys that lie in pages, with the bits of contiguous ones."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe, float_array, same_dtype
from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.attention import ATTENTION, Given, attention_like
from bijax.ops._attention_arguments import (
    LAST_POSITION,
    both,
    check_heads,
    per_sequence,
    poison,
    scale_factor,
    valid_pages,
    window_sizes,
)
from pallas_kernels.contract import attention_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.attention.cpu import AttentionSpec

_OP = "bijax.paged_attention"


@overload
def paged_attention(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    query_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def paged_attention(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    query_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def paged_attention(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    query_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    query_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `bijax.dot_product_attention` over keys and values in pages, with the same bits.

    With B sequences, T queries, P pages, n entries of a page table, N query heads, K key heads and heads of width H.
    Key j of a sequence b is `key_pages[page_table[b, j // page], j % page]`. Pages may have any size and order, and
    several sequences may share one. The keys of the queries themselves are in the cache already.

    Args:
        query: (B, T, N, H) float32, bfloat16 or float16, by default the last queries of their sequences.
        key_pages: (P, page, K, H) of the same dtype; K divides N.
        value_pages: Of the shape and dtype of `key_pages`.
        page_table: (B, n) ints in [0, P). Entries that hold no key of the sequence are not looked at.
        lengths: int or (B,) ints in [0, n * page], number of keys of each sequence, those of the queries included.
        scale: Factor of the scores, a Python number; 1 / sqrt(H) by default.
        is_causal: Whether a query sees no key after its own position.
        query_seq_lengths: (B,) ints in [0, T]; later queries see nothing. T by default.
        local_window_size: Keys (before, after) its own position that a query sees at most; an int means both.
        query_offset: int or (B,) ints, absolute position of the first query; `lengths - query_seq_lengths` by
            default.
        return_residual: Whether to return the log-sum-exp of the scores too.

    Returns:
        The outputs (B, T, N, H) of the dtype of `query`; with `return_residual` also the log-sum-exp (B, T, N) in
        float32. A query that sees no key has zeros and -inf. Where lengths, offsets or pages are traced and out of
        range, the sequence's results are nan.

    Raises:
        TypeError: If dtypes are unsupported or differ, or `scale` is traced.
        ValueError: If shapes do not fit, if lengths or offsets are out of range (`lengths` below the number of
            queries included), or if the page table points outside of the cache.
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
    """
    arrays = (("query", query), ("key_pages", key_pages), ("value_pages", value_pages))
    query, key_pages, value_pages = (float_array(_OP, n, x) for n, x in arrays)
    same_dtype(_OP, query=query, key_pages=key_pages, value_pages=value_pages)
    came = f"got query {describe(query)}, key_pages {describe(key_pages)} and value_pages {describe(value_pages)}"
    if not query.ndim == key_pages.ndim == value_pages.ndim == 4:
        raise ValueError(
            f"{_OP}: query must have the dimensions (B, T, N, H), key_pages and value_pages (P, page, K, H), {came}."
        )
    check_heads(_OP, query, key_pages, value_pages, "key_pages", "value_pages")
    batch, length = query.shape[:2]
    number, page = key_pages.shape[:2]
    if page < 1:
        raise ValueError(f"{_OP}: a page must hold at least 1 key, {came}.")
    page_table = _table(page_table, batch)
    spec = AttentionSpec(
        attention_contract(),
        scale_factor(_OP, scale, query.shape[3]),
        bool(is_causal),
        window_sizes(_OP, local_window_size),
    )
    capacity = page * page_table.shape[1]
    key_lengths, valid = per_sequence(_OP, "lengths", lengths, batch, capacity, "the keys that the page table holds")
    query_lengths, valid_queries = per_sequence(
        _OP, "query_seq_lengths", query_seq_lengths, batch, length, "the queries given, T"
    )
    meaning = "the last position supported"
    if query_offset is None:
        query_offset = key_lengths - query_lengths
        meaning = "lengths - query_seq_lengths by default: lengths counts the keys of the queries too"
    offsets, valid_offsets = per_sequence(_OP, "query_offset", query_offset, batch, LAST_POSITION, meaning)
    valid = both(both(valid, valid_queries), valid_offsets)
    valid = both(valid, valid_pages(_OP, page_table, key_lengths, page, number))
    # Whatever stands in entries without keys must not become another page when it is narrowed.
    index = jnp.clip(page_table, 0, max(0, number - 1)).astype(jnp.int32)
    out, lse = poison(
        valid, *_attention(query, key_pages, value_pages, offsets, query_lengths, key_lengths, index, spec)
    )
    return (out, lse) if return_residual else out


def _table(page_table: Any, batch: int) -> jax.Array | np.ndarray:
    table: jax.Array | np.ndarray = page_table if isinstance(page_table, jax.Array) else np.asarray(page_table)
    if not jnp.issubdtype(table.dtype, jnp.integer):
        raise TypeError(f"{_OP}: page_table must hold integers, got {describe(table)}.")
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(
            f"{_OP}: page_table must have the shape ({batch}, pages of a sequence), got {describe(table)}."
        )
    return table


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    page_table: jax.Array,
    spec: AttentionSpec,
) -> Arrays:
    arrays = (query, key_pages, value_pages, offsets, query_lengths, key_lengths, page_table)
    return _kernel(*arrays, spec=spec, given=Given(table=True))


def _no_gradient(*_: Any) -> tuple[Arrays, None]:
    raise UnsupportedError(
        f"{_OP} has no gradient: expected inference. Differentiate bijax.dot_product_attention on contiguous keys and"
        " values, which gives the same bits."
    )


_attention.defvjp(_no_gradient, _no_gradient)


def _fold_sequences(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
    """A mapped axis is more sequences on the same pages; mapped pages are separate caches."""
    query, key_pages, value_pages, *rest = arrays
    if axes[1] is not None or axes[2] is not None:
        return None
    query, *rest = fold_rows(size, (query, *rest), (axes[0], *axes[3:]))
    return unfold_rows(size, _kernel(query, key_pages, value_pages, *rest, **parameters))


_kernel = define_kernel("paged_attention", ATTENTION, _fold_sequences, shapes=attention_like)
