"""Attention: the same bits for a query in any batch, at any place in it and in any chunk of its sequence."""

from typing import Any, Final, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from bijax.core.checks import describe, flag, float_array
from bijax.core.explicit_axes import gathered_once
from bijax.ops._packed import Packed, check_packed, find_packed
from bijax.ops._sequences import Names
from bijax.ops.attention._arguments import (
    LAST_POSITION,
    both,
    check_heads,
    limits_of,
    per_sequence,
    scale_factor,
    score_array,
    window_sizes,
)
from bijax.ops.attention._keywords import ContiguousKeywords
from bijax.ops.attention._options import keys_and_values, of_heads, soft_cap
from bijax.ops.attention._rule import attend
from pallas_kernels.attention.call import AttentionCall, AttentionOptions

_OP: Final = "bijax.dot_product_attention"


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[ContiguousKeywords],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[ContiguousKeywords],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[ContiguousKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    cu_query_seq_lengths: ArrayLike | None = None,
    cu_key_value_seq_lengths: ArrayLike | None = None,
    max_query_seq_length: int | None = None,
    max_key_value_seq_length: int | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes softmax(scale * query @ key^T) @ value for each head, as `jax.nn.dot_product_attention` does.

    With B sequences, T queries, S keys, N query heads, K key heads, heads of width H, and of width V for the values.
    Keys are processed in blocks of 128 at absolute positions. Values beyond a length or masked from a query have no
    effect, nan and infinities included; so a cache may be longer than its sequences.

    On a Hopper GPU bfloat16 and float16 with heads of 64, 96, 128, 192 or 256 (V = H, or 128 with 192) have dedicated
    kernels, which also sum splits of 1024 keys separately (`pallas_kernels.contract.SplitAttentionContract`),
    as do gradients without a bias or a mask (`AttentionGradientContract`); a soft cap may be at most 1024 there.
    Everything else on a GPU from Ampere on is a Triton kernel (`pallas_kernels.contract.MmaAttentionContract`). In
    both, a query that sees a value that is not finite has nan in all of its results. Other GPUs run XLA programs
    (`pallas_kernels.contract.AttentionContract` without fused multiply-adds).

    Packed sequences are concatenated: queries (T, N, H), keys (S, K, H) and values (S, K, V) of all sequences, and
    `cu_query_seq_lengths` says where each one starts. They are copied to the padded layout (B, longest sequence, ...),
    which takes that much memory, and the results are packed again.

    Args:
        query: (B, T, N, H) or (T, N, H) float32, bfloat16 or float16.
        key: (B, S, K, H) or (S, K, H) of the same dtype, or int8 or float8_e4m3fn; K divides N.
        value: (B, S, K, V) or (S, K, V) of the dtype of `key`.
        bias: Floats that are added to the scaled scores, (B or 1, N or 1, T or 1, S or 1); leading dimensions may be
            missing.
        mask: bool of such a shape; a query does not see the keys where it is false.
        scale: Factor of the scores, a Python number; 1 / sqrt(H) by default.
        is_causal: Whether a query sees no key after its own position.
        query_seq_lengths: (B,) ints in [0, T]; later queries see nothing. T by default.
        key_value_seq_lengths: (B,) ints in [0, S]; later keys are seen by no query. S by default.
        local_window_size: Keys (before, after) its own position that a query sees at most; an int means both.
        query_offset: int or (B,) ints, absolute position of the first query; query i sits at `query_offset + i`, key
            j at j. 0 by default.
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
        cu_query_seq_lengths: (B + 1,) ints, for packed sequences and only for them: cumulative query counts, from 0.
            Queries after the last sequence are padding. Excludes a bias, a mask and other lengths.
        cu_key_value_seq_lengths: (B + 1,) ints, the same for keys and values; the queries' by default.
        max_query_seq_length: The largest length of a packed sequence's queries, a Python int. Packed sequences whose
            lengths are traced are laid out in this length, T by default.
        max_key_value_seq_length: The same for the keys, S by default.
        return_residual: Whether to return the log-sum-exp of the scores too, a sink among them. No gradient flows
            through it.

    Returns:
        The outputs, of the shape of `query` but for V, and its dtype; with `return_residual` also the log-sum-exp
        (B, T, N) or (T, N), in float32 (`jax.nn` rounds it to the dtype of the keys). A query that sees no key, also
        one beyond its `query_seq_lengths` or of no packed sequence, has zeros and -inf (`jax.nn` gives the mean of all
        values where only the keys are missing); so has one whose scores are all -inf by a bias. Where lengths or
        offsets are traced and out of range, the sequence's results are nan; all results are if packed lengths do not
        add up.

    Raises:
        TypeError: If dtypes are unsupported or differ, or `scale` or `logits_soft_cap` is traced.
        ValueError: If shapes do not fit, lengths or offsets are out of range or do not add up, or scales are missing or
            not used.
        UnsupportedError: If slopes are differentiated, or anything with quantised keys; in forward-mode
            differentiation.

    Guarantee: row-invariant; a row is a query with the keys that it sees. Its bits do not depend on the other
    sequences, the number of queries in the call, S, or whether the keys lie in one piece or in pages
    (`bijax.paged_attention`). So is the gradient of the queries; the gradients of keys and values depend on their own
    sequence alone. The gradient of a bias adds up what it was broadcast over: in each sequence as `bijax.sum` does, in
    the order of heads, queries and keys, then the sequences in order; that of the sinks the queries of each sequence,
    then the sequences, both as `bijax.sum`.

    Source: online softmax over fixed blocks of keys, arXiv:2205.14135; its backward pass, arXiv:2307.08691; sinks,
    arXiv:2309.17453; slopes, arXiv:2108.12409.

    Example:
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (2, 5, 4, 8)) for i in range(3))
        >>> whole = dot_product_attention(q, k, v, is_causal=True)
        >>> last = dot_product_attention(q[:1, 4:], k[:1], v[:1], is_causal=True, query_offset=4)
        >>> bool((whole[:1, 4:] == last).all())
        True
    """
    query, key, value = gathered_once(query, key, value)
    query = float_array(_OP, "query", query)
    (key, value), (key_scale, value_scale) = keys_and_values(
        _OP, query, ("key", "value"), (key, value), (key_scale, value_scale)
    )
    came = f"got query {describe(query)}, key {describe(key)} and value {describe(value)}"
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
        raise ValueError(
            f"{_OP}: query must have the dimensions (B, T, N, H), key and value (B, S, K, H), or all of them without"
            f" B, {came}."
        )
    check_heads(_OP, query, key, value, "key", "value")
    single, packed = query.ndim == 3, None
    if cu_query_seq_lengths is not None:
        unfit = {"bias": bias, "mask": mask, "query_seq_lengths": query_seq_lengths}
        check_packed(_OP, query, {**unfit, "key_value_seq_lengths": key_value_seq_lengths})
        packed, packed_keys = _packed(
            (query, key),
            (cu_query_seq_lengths, cu_key_value_seq_lengths),
            (max_query_seq_length, max_key_value_seq_length),
        )
        query_seq_lengths, key_value_seq_lengths = packed.lengths, packed_keys.lengths
        packed = packed._replace(valid=packed.valid & packed_keys.valid)
        query, key, value = packed.pad(query), packed_keys.pad(key), packed_keys.pad(value)
    elif any(x is not None for x in (cu_key_value_seq_lengths, max_query_seq_length, max_key_value_seq_length)):
        raise ValueError(
            f"{_OP}: cu_key_value_seq_lengths, max_query_seq_length and max_key_value_seq_length belong to packed"
            " sequences, got them without cu_query_seq_lengths."
        )
    elif single:
        query, key, value = query[None], key[None], value[None]
    batch, length = query.shape[:2]
    if key.shape[0] != batch:
        raise ValueError(f"{_OP}: query, key and value must hold as many sequences (first dimension), {came}.")
    options = AttentionOptions(
        scale_factor(_OP, scale, query.shape[3]),
        flag(_OP, "is_causal", is_causal),
        window_sizes(_OP, local_window_size),
        soft_cap(_OP, logits_soft_cap),
    )
    if query_offset is None:
        query_offset = 0
    offsets, valid_offsets = per_sequence(
        _OP, "query_offset", query_offset, batch, LAST_POSITION, "the last position supported"
    )
    query_lengths, valid_queries = per_sequence(
        _OP, "query_seq_lengths", query_seq_lengths, batch, length, "the queries given, T"
    )
    key_lengths, valid_keys = per_sequence(
        _OP, "key_value_seq_lengths", key_value_seq_lengths, batch, key.shape[1], "the keys given, S"
    )
    valid = both(valid_offsets, both(valid_queries, valid_keys))
    sizes = (batch, query.shape[2], length, key.shape[1])
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        options=options,
        bias=score_array(_OP, "bias", bias, sizes, single=single),
        mask=score_array(_OP, "mask", mask, sizes, single=single),
        sinks=of_heads(_OP, "sinks", sinks, query.shape[2]),
        alibi_slopes=of_heads(_OP, "alibi_slopes", alibi_slopes, query.shape[2]),
        key_scale=key_scale,
        value_scale=value_scale,
        limits=limits_of(offsets, query_lengths, key_lengths),
    )
    out, lse = attend(call, valid, _OP)
    if packed is not None:
        out, lse = packed.unpad(out), packed.unpad(lse, -jnp.inf)
    elif single:
        out, lse = out[0], lse[0]
    return (out, lax.stop_gradient(lse)) if flag(_OP, "return_residual", return_residual) else out


def _packed(
    arrays: tuple[jax.Array, jax.Array], sums: tuple[Any, Any], longest: tuple[int | None, int | None]
) -> tuple[Packed, Packed]:
    """Returns the places of packed queries and keys."""
    tokens = [x.shape[0] for x in arrays]
    if sums[1] is None and tokens[0] != tokens[1]:
        raise ValueError(
            f"{_OP}: without cu_key_value_seq_lengths there must be a key for each query, got {tokens[1]} keys and"
            f" {tokens[0]} queries."
        )
    names = Names("the lengths of sequences", "cu_query_seq_lengths", "max_query_seq_length")
    queries = find_packed(_OP, "query", tokens[0], sums[0], longest[0], names)
    if sums[1] is None and longest[1] is None:
        return queries, queries
    names = Names("the lengths of sequences", "cu_key_value_seq_lengths", "max_key_value_seq_length")
    return queries, find_packed(_OP, "key", tokens[1], sums[0] if sums[1] is None else sums[1], longest[1], names)
