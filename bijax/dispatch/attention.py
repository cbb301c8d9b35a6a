"""Attention by platform, architecture, dtype and head size, never by the number of queries or sequences."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.architecture import HOPPER, cuda_architecture
from bijax.core.contracts import note, run
from bijax.core.on_first_use import on_first_use
from bijax.core.primitive import Arrays, Kernel
from pallas_kernels.contract import (
    XLA_FUNCTIONS,
    EightBitContract,
    MmaAttentionContract,
    attention_contract,
    attention_gradient_contract,
    eight_bit_contract,
    mma_attention_contract,
    split_attention_contract,
)
from pallas_kernels.ops.attention import cpu
from pallas_kernels.ops.attention.call import AttentionCall, AttentionResults
from pallas_kernels.parts.xla.pages import pages_inside

if TYPE_CHECKING:
    from pallas_kernels.ops.attention import hopper, triton
else:
    hopper = on_first_use("pallas_kernels.ops.attention.hopper")
    triton = on_first_use("pallas_kernels.ops.attention.triton")


def attention_like(call: AttentionCall, **_: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of attention's results."""
    rows, value_size = call.query.shape[:3], call.value.shape[3]
    return jnp.zeros((*rows, value_size), call.query.dtype), jnp.zeros(rows, jnp.float32)


def gradients_like(call: AttentionCall, *_: Any, **__: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of its gradients."""
    return jnp.zeros_like(call.query), jnp.zeros_like(call.key), jnp.zeros_like(call.value)


def score_gradients_like(call: AttentionCall, *_: Any, **__: Any) -> Arrays:
    """Returns an array of the shape and dtype of the gradients of what is added to the scores."""
    return (_scores_like(call),)


def _scores_like(call: AttentionCall, *_: Any, **__: Any) -> jax.Array:
    batch, length, heads = call.query.shape[:3]
    return jnp.zeros((batch, heads, length, call.key.shape[1]), jnp.float32)


def _on_cpu(call: AttentionCall) -> Arrays:
    note(cpu.attention, XLA_FUNCTIONS, *_of_cache(call), arrays=call)
    call, valid = _within(call)
    return poison(valid, *run(cpu.attention, call, contract=attention_contract(), like=attention_like))


def _gradients_on_cpu(call: AttentionCall, results: AttentionResults) -> Arrays:
    note(cpu.gradients, XLA_FUNCTIONS, arrays=(call, results))
    return run(cpu.gradients, call, results, contract=attention_contract(), like=gradients_like)


def _score_gradients_on_cpu(call: AttentionCall, results: AttentionResults) -> Arrays:
    note(cpu.score_gradients, XLA_FUNCTIONS, arrays=(call, results))
    return (run(cpu.score_gradients, call, results, contract=attention_contract(), like=_scores_like),)


def _on_cuda(call: AttentionCall) -> Arrays:
    contract = split_attention_contract(*_widths(call))
    if contract is not None and cuda_architecture() == HOPPER and hopper.supports(call.options):
        note(hopper.attention, *_of_cache(call), arrays=call)
        return run(hopper.attention, call, contract=contract, like=attention_like)
    note(triton.attention, *_of_cache(call), arrays=call)
    call, valid = _within(call)
    return poison(valid, *run(triton.attention, call, contract=_mma_contract(call), like=attention_like))


def _gradients_on_cuda(call: AttentionCall, results: AttentionResults) -> Arrays:
    contract = attention_gradient_contract(*_widths(call)) if set(call.present) <= {"alibi_slopes"} else None
    if contract is not None and cuda_architecture() == HOPPER and hopper.supports(call.options):
        return run(hopper.attention_gradients, call, results, contract=contract, like=gradients_like)
    return run(triton.gradients, call, results, contract=_mma_contract(call), like=gradients_like)


def _score_gradients_on_cuda(call: AttentionCall, results: AttentionResults) -> Arrays:
    return (run(triton.score_gradients, call, results, contract=_mma_contract(call), like=_scores_like),)


def _widths(call: AttentionCall) -> tuple[int, str, int]:
    """Returns what contracts are chosen by: the width of a head, the dtype and the width of a head of the values."""
    return call.key.shape[-1], call.query.dtype.name, call.value.shape[-1]


def _mma_contract(call: AttentionCall) -> MmaAttentionContract:
    return mma_attention_contract(call.query.dtype.name, max(call.key.shape[-1], call.value.shape[-1]))


def _of_cache(call: AttentionCall) -> tuple[EightBitContract, ...]:
    """Returns the contract of keys of 8 bits, if they are."""
    return () if call.key_scale is None else (eight_bit_contract(call.key.dtype.name),)


def marked(limits: jax.Array | np.ndarray, valid: jax.Array | None) -> jax.Array | np.ndarray:
    """Returns limits in which sequences that are not valid have a negative number of queries.

    Kernels give nan for them, so that a program has no further pass over the results.

    Args:
        limits: (B, 3) int32.
        valid: (B,) bool; None for all.
    """
    if valid is None:
        return limits
    offsets, queries, keys = (limits[:, i] for i in range(3))
    return jnp.stack([offsets, jnp.where(valid, queries, -1), keys], axis=1)


def poison(valid: jax.Array | None, *results: jax.Array) -> Arrays:
    """Returns results (B, ...) with nan for sequences that are not valid."""
    if valid is None:
        return results
    return tuple(jnp.where(valid.reshape(-1, *[1] * (r.ndim - 1)), r, jnp.asarray(jnp.nan, r.dtype)) for r in results)


def _within(call: AttentionCall) -> tuple[AttentionCall, jax.Array]:
    """Returns the call with limits and pages that exist, and the (B,) mask of sequences that had such."""
    limits, table = jnp.asarray(call.limits), call.page_table
    valid = limits[:, 1] >= 0
    if table is not None:
        page, count = call.key.shape[1], call.key.shape[0]
        valid = valid & pages_inside(table, limits[:, 2], page, count)
        table = jnp.clip(table, 0, max(0, count - 1))
    return replace(call, limits=jnp.maximum(limits, 0), page_table=table), valid


ATTENTION: Final[dict[str, Kernel]] = {"cpu": _on_cpu, "cuda": _on_cuda}
"""Attention of contiguous caches, or of paged ones."""

GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _gradients_on_cpu, "cuda": _gradients_on_cuda}
"""The backward pass of attention to a contiguous cache."""

SCORE_GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _score_gradients_on_cpu, "cuda": _score_gradients_on_cuda}
"""The gradients of what is added to the scores."""
