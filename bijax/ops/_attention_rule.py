"""Attention without checks: its kernels as primitives, their batching rules, and its derivative."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from bijax.core.checks import describe
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.attention import (
    ATTENTION,
    GRADIENTS,
    SCORE_GRADIENTS,
    Given,
    attention_like,
    gradients_like,
    marked,
    poison,
    score_gradients_like,
)
from bijax.ops.elementwise import elementwise
from bijax.ops.reductions import sum as add_up
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.attention.cpu import AttentionSpec


class Extras(NamedTuple):
    """Further arrays of a call, as `bijax.dispatch.attention.Given` names them, or None."""

    page_table: jax.Array | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    sinks: jax.Array | None = None
    slopes: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    common_prefix: jax.Array | None = None

    def only(self, *names: str) -> "Extras":
        """Returns the named arrays alone."""
        return Extras(**{name: getattr(self, name) for name in names})

    @property
    def given(self) -> Given:
        """Which there are."""
        return Given(**{name: x is not None for name, x in self._asdict().items()})

    @property
    def arrays(self) -> Arrays:
        """Those that there are, in order."""
        return tuple(x for x in self if x is not None)


_OF_SCORES: Final = ("bias", "mask", "slopes")
"""What the backward pass needs; a sink is in the log-sum-exp."""


@custom_vjp(nondiff_argnums=(6, 7))
def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    limits: jax.Array | np.ndarray,
    valid: jax.Array | None,
    extras: Extras,
    spec: AttentionSpec,
    op: str,
) -> Arrays:
    """Attention of arrays (B, ...); returns the outputs and the log-sum-exp.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H), or (P, page, K, H) with a page table.
        value: (B, S, K, V), or (P, page, K, V).
        limits: (B, 3) int32, numbers of each sequence: position of the first query, queries, keys.
        valid: (B,) bool, sequences whose results are not nan; None for all.
        extras: Further arrays, with a leading dimension of B or 1.
        spec: What is fixed.
        op: Name of the operation, for errors.
    """
    kernel = _kernel if extras.page_table is None else _paged_kernel
    arrays = (query, key, value, marked(limits, valid), *extras.arrays)
    return kernel(*arrays, spec=spec, given=extras.given)


def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    limits: jax.Array | np.ndarray,
    extras: Extras,
    spec: AttentionSpec,
) -> Arrays:
    """Returns the gradients of queries, keys and values.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, V).
        out: (B, T, N, V), the outputs.
        lse: (B, T, N) float32.
        cotangent: Of the outputs.
        limits: As in `attend`.
        extras: As in `attend`.
        spec: What is fixed.
    """
    own = extras.only(*_OF_SCORES)
    arrays = (query, key, value, out, lse, cotangent, limits, *own.arrays)
    return _gradients_kernel(*arrays, spec=spec, given=own.given)


def bias_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    limits: jax.Array | np.ndarray,
    extras: Extras,
    spec: AttentionSpec,
) -> jax.Array:
    """Returns the gradient of the bias; arguments as for `gradients`.

    What it was broadcast over is added up in each sequence first, in row-major order of heads, queries and keys
    (`bijax.sum`), and then over the sequences, upwards, in float32. Where anything is added up, the gradients of the
    scores of one sequence (N, T, S) exist at a time.
    """
    bias = extras.bias
    if bias is None:
        raise ValueError("bias_gradient: expected a bias among the extras, got none.")
    own = extras.only(*_OF_SCORES)
    sizes = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    arrays = (query, key, value, out, lse, cotangent, limits, *own.arrays)
    first = len(arrays) - len(own.arrays)
    if 0 in sizes:
        return jnp.zeros_like(bias)
    if bias.shape == sizes:
        (found,) = _scores_kernel(*arrays, spec=spec, given=own.given)
        return found.astype(bias.dtype)
    added = tuple(axis for axis in (1, 2, 3) if bias.shape[axis] < sizes[axis])

    def one(s: jax.Array) -> jax.Array:
        part = (lax.dynamic_slice_in_dim(x, s, 1) if i < first or x.shape[0] > 1 else x for i, x in enumerate(arrays))
        (found,) = _scores_kernel(*part, spec=spec, given=own.given)
        return add_up(found, axis=added, keepdims=True)

    index = jnp.arange(sizes[0], dtype=jnp.int32)
    if bias.shape[0] == 1:
        # The first sequence starts the sum, so that it varies over the axes of a mesh as what is added.
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
def _sink_slopes() -> Any:
    return elementwise(lambda z, lse, delta: jnp.where(lse == -jnp.inf, 0.0, -jnp.exp(z - lse) * delta))


def _forward(*arguments: Any) -> tuple[Arrays, Any]:
    *differentiated, spec, op = arguments
    leaves = jax.tree.leaves(differentiated, is_leaf=lambda x: hasattr(x, "perturbed"))
    extras = differentiated[-1]
    if any(x.perturbed for x in leaves):
        _check_differentiable(op, extras)
    values = jax.tree.map(lambda x: x.value, differentiated, is_leaf=lambda x: hasattr(x, "perturbed"))
    out, lse = attend(*values, spec, op)
    # An empty entry for each further gradient: what is wanted must be known when the backward pass is traced.
    wanted = {n: () for n in ("bias", "sinks") if (x := getattr(extras, n)) is not None and x.perturbed}
    return (out, lse), (*values, out, lse, wanted)


def _check_differentiable(op: str, extras: Any) -> None:
    if extras.page_table is not None:
        raise UnsupportedError(
            f"{op} has no gradient: expected inference. Differentiate bijax.dot_product_attention on contiguous keys"
            " and values, which gives the same bits."
        )
    if extras.key_scale is not None:
        raise UnsupportedError(
            f"{op} has no gradient with quantised keys and values: expected inference. Differentiate it with queries"
            " that are multiplied by the factors of keys, and multiply its result by those of values:"
            " pallas_kernels.contract.EightBitContract says how, which gives the same bits."
        )
    if extras.slopes is not None and extras.slopes.perturbed:
        raise UnsupportedError(
            f"{op} has no gradient of alibi_slopes: expected slopes that are not differentiated, got"
            f" {describe(extras.slopes.value)} among what is. Pass jax.lax.stop_gradient(alibi_slopes), or a bias,"
            " which has a gradient."
        )


def _backward(spec: AttentionSpec, op: str, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    query, key, value, limits, valid, extras, out, lse, wanted = saved
    cotangent = cotangents[0]
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros_like(out)
    arrays = (query, key, value, out, lse, cotangent)
    of_arrays = poison(valid, *gradients(*arrays, limits, extras, spec))
    further: dict[str, Any] = {}
    if "bias" in wanted:
        of_bias = bias_gradient(*arrays, limits, extras, spec)
        valid = jnp.all(valid, keepdims=True) if valid is not None and of_bias.shape[0] == 1 else valid
        (further["bias"],) = poison(valid, of_bias)
    if "sinks" in wanted:
        further["sinks"] = _sinks_gradient(extras.sinks, out, lse, cotangent)
    return (*of_arrays, None, None, Extras(**further))


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _folded(size: int, arrays: Arrays, axes: Sequence[int | None], given: Given, shared: Sequence[int] = ()) -> Arrays:
    """Returns the arrays with a mapped axis as more sequences.

    Args:
        size: Length of the mapped axis.
        arrays: The arrays of a call.
        axes: Position of the mapped axis in each.
        given: Which further arrays there are; one of all sequences stays one of all if it is not mapped.
        shared: Indices of arrays that all sequences share.
    """
    first = len(arrays) - len(given.names)
    own = [i for i in range(len(arrays)) if i not in shared and (i < first or given.names[i - first] == "page_table")]
    folded = dict(zip(own, fold_rows(size, tuple(arrays[i] for i in own), [axes[i] for i in own]), strict=True))
    batch = folded[0].shape[0] // size
    for i, (array, axis) in enumerate(zip(arrays, axes, strict=True)):
        if i in folded:
            continue
        if i in shared or (axis is None and array.shape[0] == 1):
            folded[i] = array
            continue
        whole = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
        whole = jnp.broadcast_to(whole, (size, batch, *whole.shape[2:]))
        folded[i] = whole.reshape(size * batch, *whole.shape[2:])
    return tuple(folded[i] for i in range(len(arrays)))


def _fold_sequences(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """A mapped axis is more sequences."""
    return unfold_rows(size, _kernel(*_folded(size, arrays, axes, parameters["given"]), **parameters))


def _fold_gradients(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, _gradients_kernel(*_folded(size, arrays, axes, parameters["given"]), **parameters))


def _fold_scores(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, _scores_kernel(*_folded(size, arrays, axes, parameters["given"]), **parameters))


def _fold_paged(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
    """A mapped axis is more sequences on the same pages; mapped pages are separate caches."""
    if axes[1] is not None or axes[2] is not None:
        return None
    if parameters["given"].common_prefix:  # the last array; what is common to each entry is not common to all
        arrays, axes = arrays[:-1], axes[:-1]
        parameters = parameters | {"given": dataclasses.replace(parameters["given"], common_prefix=False)}
    folded = _folded(size, arrays, axes, parameters["given"], shared=(1, 2))
    return unfold_rows(size, _paged_kernel(*folded, **parameters))


_kernel = define_kernel("attention", ATTENTION, _fold_sequences, shapes=attention_like)
_paged_kernel = define_kernel("paged_attention", ATTENTION, _fold_paged, shapes=attention_like)
_gradients_kernel = define_kernel("attention_gradients", GRADIENTS, _fold_gradients, shapes=gradients_like)
_scores_kernel = define_kernel("attention_score_gradients", SCORE_GRADIENTS, _fold_scores, shapes=score_gradients_like)
