"""Chooses attention kernels by target, dtype and head width, never by the number of queries or sequences."""

from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp

from bijax.core.contracts import note, run
from bijax.core.primitive import Arrays, Backend
from bijax.dispatch.kernels import as_tuple
from pallas_kernels.attention.call import AttentionCall, AttentionResults
from pallas_kernels.contract import eight_bit_contract
from pallas_kernels.registry import find
from pallas_kernels.target import Target


def attention_like(call: AttentionCall, **_: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of the results of attention."""
    rows, value_size = call.query.shape[:3], call.value_size
    return jnp.zeros((*rows, value_size), call.query.dtype), jnp.zeros(rows, jnp.float32)


def gradients_like(call: AttentionCall, *_: Any, **__: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of the gradients."""
    return jnp.zeros_like(call.query), jnp.zeros_like(call.key), jnp.zeros_like(call.values)


def score_gradients_like(call: AttentionCall, *_: Any, **__: Any) -> Arrays:
    """Returns an array of the shape and dtype of the gradients of the bias."""
    batch, length, heads = call.query.shape[:3]
    return (jnp.zeros((batch, heads, length, call.key.shape[1]), jnp.float32),)


def _backend(operation: str, like: Callable[..., Arrays]) -> Backend:
    """Returns a backend that runs the registered kernel for a call.

    Args:
        operation: Name of the operation; `git grep '"NAME"' pallas_kernels/backends` finds its kernels.
        like: Returns arrays of the shapes and dtypes of its results.
    """

    def backend(target: Target, call: AttentionCall, *results: AttentionResults) -> Arrays:
        widths = call.key.shape[-1], call.query.dtype.name, call.value_size
        _, function, contracts = find(operation, target, widths, call, *results)
        if call.key_scale is not None:
            note(function, eight_bit_contract(call.key.dtype.name), arrays=call)
        return as_tuple(run(function, call, *results, like=like, **contracts))

    return backend


ATTENTION: Final = _backend("attention", attention_like)
"""Attention to contiguous or paged caches."""

GRADIENTS: Final = _backend("attention_gradients", gradients_like)
"""The backward pass of attention to a contiguous cache."""

SCORE_GRADIENTS: Final = _backend("attention_score_gradients", score_gradients_like)
"""The gradients of the bias of the scores."""
