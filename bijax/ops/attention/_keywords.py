"""The keyword arguments of attention, for type checkers: what both functions take, and what each takes besides."""

from typing import Any, TypedDict


class AttentionKeywords(TypedDict, total=False):
    """Keywords of both `bijax.dot_product_attention` and `bijax.paged_attention`; see their docstrings."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Any
    local_window_size: int | tuple[int, int] | None
    query_offset: Any
    logits_soft_cap: float | None
    sinks: Any
    alibi_slopes: Any
    key_scale: Any
    value_scale: Any
    cu_query_seq_lengths: Any
    max_query_seq_length: int | None


class ContiguousKeywords(AttentionKeywords, total=False):
    """Keywords of `bijax.dot_product_attention`."""

    key_value_seq_lengths: Any
    cu_key_value_seq_lengths: Any
    max_key_value_seq_length: int | None


class PagedKeywords(AttentionKeywords, total=False):
    """Keywords of `bijax.paged_attention`."""

    common_prefix_length: Any
