"""Attention without checks: its kernels as primitives, their batching rules, and its derivative."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from bijax.core.checks import describe
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays, fold_rows, unfold_rows
from bijax.core.records import define_record_kernel
from bijax.dispatch.attention import (
    ATTENTION,
    GRADIENTS,
    SCORE_GRADIENTS,
    attention_like,
    gradients_like,
    score_gradients_like,
)
from bijax.ops.elementwise.call import elementwise
from bijax.ops.rows.reductions import sum as add_up
from pallas_kernels.attention.call import OF_SCORES, AttentionCall, AttentionResults
from pallas_kernels.attention.limits import marked, poison
from pallas_kernels.errors import UnsupportedError

_DIFFERENTIABLE: Final = ("bias", "sinks")
"""The optional arrays that have gradients."""


@custom_vjp(nondiff_argnums=(2,))
def attend(call: AttentionCall, valid: jax.Array | None, op: str) -> Arrays:
    """Returns the outputs and the log-sum-exp of a call.

    Args:
        call: The call.
        valid: (B,) bool, sequences whose results are not nan; None for all.
        op: Name of the operation, for errors.
    """
    kernel = _kernel if call.page_table is None else _paged_kernel
    return kernel(replace(call, limits=marked(call.limits, valid)))


def gradients(call: AttentionCall, results: AttentionResults) -> Arrays:
    """Returns the gradients of queries, keys and values of a call without pages.

    Where values are columns of the keys, each of the two has its own gradient.
    """
    return _gradients_kernel(call.only(*OF_SCORES), results)


def bias_gradient(call: AttentionCall, results: AttentionResults) -> jax.Array:
    """Returns the gradient of the bias of a call without pages.

    Broadcast dimensions are summed within each sequence first, in row-major order of heads, queries and keys
    (`bijax.sum`), and then over the sequences, in ascending order, in float32. Where a sum is needed, the score
    gradients of one sequence (N, T, S) exist at a time.
    """
    bias = call.bias
    if bias is None:
        raise ValueError("bias_gradient: expected a call with a bias, got none.")
    call = call.only(*OF_SCORES)
    sizes = (call.query.shape[0], call.query.shape[2], call.query.shape[1], call.key.shape[1])
    if 0 in sizes:
        return jnp.zeros_like(bias)
    if bias.shape == sizes:
        (found,) = _scores_kernel(call, results)
        return found.astype(bias.dtype)
    added = tuple(axis for axis in (1, 2, 3) if bias.shape[axis] < sizes[axis])

    def one(s: jax.Array) -> jax.Array:
        rows = call.sequence(s, ("query", "key", "value"))
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, s, 1), results)
        (found,) = _scores_kernel(rows.sequence(s, ("limits", *call.present)), own)
        return add_up(found, axis=added, keepdims=True)

    index = jnp.arange(sizes[0], dtype=jnp.int32)
    if bias.shape[0] == 1:
        # The first sequence starts the sum, so that it varies over the same mesh axes as the terms.
        total, _ = lax.scan(lambda total, s: (total + one(s), None), one(index[0]), index[1:])
        return total.astype(bias.dtype)
    of_sequences: jax.Array = lax.map(one, index)
    return of_sequences[:, 0].astype(bias.dtype)


def _sinks_gradient(sinks: jax.Array, out: jax.Array, lse: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Returns the gradient of sinks (B or 1, N): the queries of each sequence added up, then the sequences."""
    delta = add_up(_products()(cotangent, out), axis=3)
    parts = add_up(_sink_slopes()(sinks.astype(jnp.float32)[:, None], lse, delta), axis=1)
    return (add_up(parts, axis=0, keepdims=True) if sinks.shape[0] == 1 else parts).astype(sinks.dtype)


@functools.cache
def _products() -> Any:
    return elementwise(lambda a, b: a.astype(jnp.float32) * b.astype(jnp.float32))


@functools.cache
def _both_gradients() -> Any:
    return elementwise(lambda a, b: (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype))


@functools.cache
def _sink_slopes() -> Any:
    return elementwise(lambda z, lse, delta: jnp.where(lse == -jnp.inf, 0.0, -jnp.exp(z - lse) * delta))


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _forward(call: AttentionCall, valid: Any, op: str) -> tuple[Arrays, Any]:
    if any(x.perturbed for x in jax.tree.leaves((call, valid), is_leaf=_is_primal)):
        _check_differentiable(op, call)
    given: tuple[AttentionCall, Any] = jax.tree.map(lambda x: x.value, (call, valid), is_leaf=_is_primal)
    out, lse = attend(*given, op)
    # An empty entry for each optional gradient: which are wanted must be known when the backward pass is traced.
    wanted = {n: () for n in _DIFFERENTIABLE if (x := getattr(call, n)) is not None and x.perturbed}
    return (out, lse), (*given, out, lse, wanted)


def _check_differentiable(op: str, call: AttentionCall) -> None:
    if call.page_table is not None:
        raise UnsupportedError(
            f"{op} has no gradient: expected inference. Differentiate bijax.dot_product_attention on contiguous keys"
            " and values, which gives the same bits."
        )
    if call.key_scale is not None:
        raise UnsupportedError(
            f"{op} has no gradient with quantised keys and values: expected inference. Differentiate it with queries"
            " that are multiplied by the factors of keys, and multiply its result by those of values:"
            " pallas_kernels.contract.EightBitContract says how, which gives the same bits."
        )
    for name in call.present:
        x = getattr(call, name)
        if name not in _DIFFERENTIABLE and x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating):
            raise UnsupportedError(
                f"{op} has no gradient of {name}: expected an array that is not differentiated, got"
                f" {describe(x.value)} among what is. Pass jax.lax.stop_gradient({name}), or a bias, which has a"
                " gradient."
            )


def _backward(op: str, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    call, valid, out, lse, wanted = saved
    cotangent = cotangents[0]
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros_like(out)
    results = AttentionResults(out, lse, cotangent)
    dq, dk, dv = poison(valid, *gradients(call, results))
    found = {"query": dq, "key": dk, "value": dv}
    if call.value is None:
        columns = [(0, 0), (0, 0), (0, 0), (0, dk.shape[3] - dv.shape[3])]
        found = {"query": dq, "key": _both_gradients()(dk, jnp.pad(dv, columns))}
    if "bias" in wanted:
        of_bias = bias_gradient(call, results)
        valid = jnp.all(valid, keepdims=True) if valid is not None and of_bias.shape[0] == 1 else valid
        (found["bias"],) = poison(valid, of_bias)
    if "sinks" in wanted:
        found["sinks"] = _sinks_gradient(call.sinks, out, lse, cotangent)
    return replace(call.only(), limits=None, **found), None


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _folded(size: int, records: Any, axes: Any) -> tuple[Any, ...]:
    """Returns a call, and in the backward pass its results, with a mapped axis as more sequences.

    Args:
        size: Length of the mapped axis.
        records: The call, and its results.
        axes: Position of the mapped axis in each array. Pages must not be mapped: all sequences share them.
    """
    (call, *results), (call_axes, *results_axes) = records, axes

    def folded(record: Any, places: Any, names: Sequence[str]) -> dict[str, jax.Array]:
        arrays = tuple(getattr(record, name) for name in names)
        return dict(zip(names, fold_rows(size, arrays, [getattr(places, name) for name in names]), strict=True))

    own = folded(call, call_axes, call.of_sequences)
    batch = own["query"].shape[0] // size
    for name in call.present:
        if name not in own:
            own[name] = _folded_options(size, batch, getattr(call, name), getattr(call_axes, name))
    more = [replace(x, **folded(x, places, list(vars(x)))) for x, places in zip(results, results_axes, strict=True)]
    return replace(call, **own), *more


def _folded_options(size: int, batch: int, array: jax.Array, axis: int | None) -> jax.Array:
    """Returns an array (B or 1, ...) as (size * B, ...), or as it is where it is one for all entries and sequences."""
    if axis is None and array.shape[0] == 1:
        return array
    whole = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
    whole = jnp.broadcast_to(whole, (size, batch, *whole.shape[2:]))
    return whole.reshape(size * batch, *whole.shape[2:])


def _fold_sequences(size: int, records: Any, axes: Any) -> Arrays:
    return unfold_rows(size, _kernel(*_folded(size, records, axes)))


def _fold_gradients(size: int, records: Any, axes: Any) -> Arrays:
    return unfold_rows(size, _gradients_kernel(*_folded(size, records, axes)))


def _fold_scores(size: int, records: Any, axes: Any) -> Arrays:
    return unfold_rows(size, _scores_kernel(*_folded(size, records, axes)))


def _fold_paged(size: int, records: Any, axes: Any) -> Arrays | None:
    """A mapped axis is more sequences on the same pages; mapped pages are separate caches."""
    (call,), (places,) = records, axes
    if places.key is not None or places.value is not None:
        return None
    # A prefix common to each entry need not be common to all.
    call = replace(call, common_prefix=None)
    return unfold_rows(size, _paged_kernel(*_folded(size, (call,), axes)))


_kernel = define_record_kernel("attention", ATTENTION, _fold_sequences, attention_like)
_paged_kernel = define_record_kernel("paged_attention", ATTENTION, _fold_paged, attention_like)
_gradients_kernel = define_record_kernel("attention_gradients", GRADIENTS, _fold_gradients, gradients_like)
_scores_kernel = define_record_kernel("attention_score_gradients", SCORE_GRADIENTS, _fold_scores, score_gradients_like)
