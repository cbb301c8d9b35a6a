"""Attention: the same bits for a query in any batch, at any place in it and in any chunk of its sequence."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from bijax.core.checks import describe, float_array, same_dtype
from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.attention import ATTENTION, GRADIENTS, Given, attention_like, gradients_like
from bijax.ops._attention_arguments import (
    LAST_POSITION,
    both,
    check_heads,
    per_sequence,
    poison,
    scale_factor,
    score_array,
    window_sizes,
)
from pallas_kernels.contract import attention_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.attention.cpu import AttentionSpec

_OP = "bijax.dot_product_attention"


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: Any = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes softmax(scale * query @ key^T) @ value for each head, as `jax.nn.dot_product_attention` does.

    With B sequences, T queries, S keys, N query heads, K key heads and heads of width H. Keys are walked in blocks of
    128 at absolute positions. What the arrays hold beyond a length, or where a query does not look, leaves no trace,
    nan and infinities included; so a cache may be longer than its sequences.

    On a Hopper GPU bfloat16 and float16 with heads of 64, 96, 128, 192 or 256, without a bias or a mask, have kernels
    of their own, the gradients of heads of 64 and 128 too, which also sum splits of 1024 keys apart
    (`pallas_kernels.contract.SplitAttentionContract`, `AttentionGradientContract`). Everything else on any GPU is a
    Triton kernel (`pallas_kernels.contract.MmaAttentionContract`). On a GPU a query that sees a value that is not
    finite has nan in all of its results.

    Args:
        query: (B, T, N, H) or (T, N, H) float32, bfloat16 or float16.
        key: (B, S, K, H) or (S, K, H) of the same dtype; K divides N.
        value: Of the shape and dtype of `key`.
        bias: Floats that are added to the scaled scores, (B or 1, N or 1, T or 1, S or 1); leading dimensions may be
            missing. It has no gradient.
        mask: bool of such a shape; a query does not see the keys where it is false.
        scale: Factor of the scores, a Python number; 1 / sqrt(H) by default.
        is_causal: Whether a query sees no key after its own position.
        query_seq_lengths: (B,) ints in [0, T]; later queries see nothing. T by default.
        key_value_seq_lengths: (B,) ints in [0, S]; later keys are seen by no query. S by default.
        local_window_size: Keys (before, after) its own position that a query sees at most; an int means both.
        query_offset: int or (B,) ints, absolute position of the first query; query i sits at `query_offset + i`, key
            j at j. 0 by default.
        return_residual: Whether to return the log-sum-exp of the scores too. No gradient flows through it.

    Returns:
        The outputs, of the shape and dtype of `query`; with `return_residual` also the log-sum-exp (B, T, N) or
        (T, N), in float32 (`jax.nn` rounds it to the dtype of the keys). A query that sees no key, also one beyond
        its `query_seq_lengths`, has zeros and -inf (`jax.nn` gives the mean of all values where only the keys are
        missing); so has one whose scores are all -inf by a bias. Where lengths or offsets are traced and out of range,
        the sequence's results are nan.

    Raises:
        TypeError: If dtypes are unsupported or differ, or `scale` is traced.
        ValueError: If shapes do not fit, or lengths or offsets are out of range.
        UnsupportedError: If the bias is differentiated; in forward-mode differentiation.

    Guarantee: row-invariant; a row is a query with the keys that it sees. Its bits do not depend on the other
    sequences, the number of queries in the call, S, or whether the keys lie in one piece or in pages
    (`bijax.paged_attention`). So is the gradient of the queries; the gradients of keys and values depend on their own
    sequence alone.

    Source: online softmax over fixed blocks of keys, arXiv:2205.14135; its backward pass, arXiv:2307.08691.

    Example:
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (2, 5, 4, 8)) for i in range(3))
        >>> whole = dot_product_attention(q, k, v, is_causal=True)
        >>> last = dot_product_attention(q[:1, 4:], k[:1], v[:1], is_causal=True, query_offset=4)
        >>> bool((whole[:1, 4:] == last).all())
        True
    """
    query, key, value = (float_array(_OP, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    same_dtype(_OP, query=query, key=key, value=value)
    came = f"got query {describe(query)}, key {describe(key)} and value {describe(value)}"
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
        raise ValueError(
            f"{_OP}: query must have the dimensions (B, T, N, H), key and value (B, S, K, H), or all of them without"
            f" B, {came}."
        )
    check_heads(_OP, query, key, value, "key", "value")
    single = query.ndim == 3
    if single:
        query, key, value = query[None], key[None], value[None]
    batch, length = query.shape[:2]
    if key.shape[0] != batch:
        raise ValueError(f"{_OP}: query, key and value must hold as many sequences (first dimension), {came}.")
    spec = AttentionSpec(
        attention_contract(),
        scale_factor(_OP, scale, query.shape[3]),
        bool(is_causal),
        window_sizes(_OP, local_window_size),
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
    bias = score_array(_OP, "bias", bias, sizes, single=single)
    mask = score_array(_OP, "mask", mask, sizes, single=single)
    out, lse = _attention(query, key, value, offsets, query_lengths, key_lengths, valid, bias, mask, spec)
    if single:
        out, lse = out[0], lse[0]
    return (out, lax.stop_gradient(lse)) if return_residual else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(9,))
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    valid: jax.Array | None,
    bias: jax.Array | None,
    mask: jax.Array | None,
    spec: AttentionSpec,
) -> Arrays:
    """Attention of arrays (B, ...), without checks; returns the outputs and the log-sum-exp."""
    given, others = _given(bias, mask)
    arrays = (query, key, value, offsets, query_lengths, key_lengths, *others)
    return poison(valid, *_kernel(*arrays, spec=spec, given=given))


def _given(bias: jax.Array | None, mask: jax.Array | None) -> tuple[Given, Arrays]:
    return Given(bias=bias is not None, mask=mask is not None), tuple(x for x in (bias, mask) if x is not None)


_Saved = tuple[jax.Array | None, ...]


def _forward(*arguments: Any) -> tuple[Arrays, _Saved]:
    *differentiated, spec = arguments
    bias = differentiated[7]
    if bias is not None and bias.perturbed:
        raise UnsupportedError(
            f"{_OP} has no gradient of the bias: expected one that is not differentiated, got {describe(bias.value)}"
            " among what is. Pass jax.lax.stop_gradient(bias), or add the bias to the scores by hand."
        )
    values = [None if x is None else x.value for x in differentiated]
    out, lse = _attention(*values, spec)
    return (out, lse), (*values, out, lse)


def _backward(spec: AttentionSpec, saved: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
    query, key, value, *lengths, valid, bias, mask, out, lse = saved
    cotangent = cotangents[0]
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros_like(out)
    given, others = _given(bias, mask)
    arrays = (query, key, value, out, lse, cotangent, *lengths, *others)
    grads = _gradients_kernel(*arrays, spec=spec, given=given)
    return (*poison(valid, *grads), *[None] * 6)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


def _folded(size: int, arrays: Arrays, axes: Sequence[int | None], given: Given) -> Arrays:
    """Returns the arrays with a mapped axis as more sequences; a bias or mask of all stays one of all."""
    count = given.bias + given.mask
    first = len(arrays) - count
    sequences = fold_rows(size, arrays[:first], axes[:first])
    batch = sequences[0].shape[0] // size
    others = []
    for array, axis in zip(arrays[first:], axes[first:], strict=True):
        if axis is None and array.shape[0] == 1:
            others.append(array)
            continue
        whole = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
        whole = jnp.broadcast_to(whole, (size, batch, *whole.shape[2:]))
        others.append(whole.reshape(size * batch, *whole.shape[2:]))
    return (*sequences, *others)


def _fold_sequences(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """A mapped axis is more sequences."""
    return unfold_rows(size, _kernel(*_folded(size, arrays, axes, parameters["given"]), **parameters))


def _fold_gradients(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, _gradients_kernel(*_folded(size, arrays, axes, parameters["given"]), **parameters))


_kernel = define_kernel("attention", ATTENTION, _fold_sequences, shapes=attention_like)
_gradients_kernel = define_kernel("attention_gradients", GRADIENTS, _fold_gradients, shapes=gradients_like)
