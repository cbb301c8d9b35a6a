"""Attention by platform, architecture, dtype and head size, never by the number of queries or sequences."""

from dataclasses import dataclass, fields
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
    attention_gradient_contract,
    eight_bit_contract,
    mma_attention_contract,
    split_attention_contract,
)
from pallas_kernels.ops.attention import cpu
from pallas_kernels.ops.attention.cpu import AttentionSpec
from pallas_kernels.parts.xla.pages import pages_inside

if TYPE_CHECKING:
    from pallas_kernels.ops.attention import hopper, triton
else:
    hopper = on_first_use("pallas_kernels.ops.attention.hopper")
    triton = on_first_use("pallas_kernels.ops.attention.triton")


@dataclass(frozen=True)
class Given:
    """Which arrays stand behind the others of a call, in this order.

    Attributes:
        page_table: (B, n) int32, the pages of each sequence; nan results where those that hold keys do not exist.
        bias: Added to the scores.
        mask: Which keys a query sees.
        sinks: (B or 1, N), scores that belong to no key.
        slopes: (B or 1, N), added for each step from the query to the key.
        key_scale: (B or 1, K, H or 1), the factors of quantised keys.
        value_scale: (B or 1, K, V or 1), those of quantised values.
        common_prefix: (1,), the keys that all sequences begin with; it changes no bit, and only some kernels use it.
    """

    page_table: bool = False
    bias: bool = False
    mask: bool = False
    sinks: bool = False
    slopes: bool = False
    key_scale: bool = False
    value_scale: bool = False
    common_prefix: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, by which kernels know them."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name))

    def named(self, arrays: Arrays) -> dict[str, jax.Array]:
        """Returns the arrays by their names."""
        return dict(zip(self.names, arrays, strict=True))


_FORWARD: Final = 4
"""Arrays of every call: query, key, value and the limits of sequences (see `marked`)."""

_BACKWARD: Final = 7
"""The same with the result, the log-sum-exp and the cotangent before the limits."""


def attention_like(query: jax.Array, key: jax.Array, value: jax.Array, *_: Any, **__: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of attention's results."""
    return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype), jnp.zeros(query.shape[:3], jnp.float32)


def gradients_like(query: jax.Array, key: jax.Array, value: jax.Array, *_: Any, **__: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of its gradients."""
    return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)


def score_gradients_like(*arrays: jax.Array, **parameters: Any) -> Arrays:
    """Returns an array of the shape and dtype of the gradients of what is added to the scores."""
    return (_scores_like(*arrays, **parameters),)


def _scores_like(query: jax.Array, key: jax.Array, *_: Any, **__: Any) -> jax.Array:
    batch, length, heads = query.shape[:3]
    return jnp.zeros((batch, heads, length, key.shape[1]), jnp.float32)


def _on_cpu(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    note(cpu.attention, XLA_FUNCTIONS, *_of_cache(arrays, given), arrays=arrays)
    arrays, valid = _within(arrays, given)
    own, others = _apart(arrays[:_FORWARD]), given.named(arrays[_FORWARD:])
    others.pop("common_prefix", None)
    return poison(valid, *run(cpu.attention, *own, like=attention_like, spec=spec, **others))


def _gradients_on_cpu(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    note(cpu.gradients, XLA_FUNCTIONS, arrays=arrays)
    own, others = _apart(arrays[:_BACKWARD]), given.named(arrays[_BACKWARD:])
    return run(cpu.gradients, *own, like=gradients_like, spec=spec, **others)


def _score_gradients_on_cpu(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    note(cpu.score_gradients, XLA_FUNCTIONS, arrays=arrays)
    others = given.named(arrays[_BACKWARD:])
    return (run(cpu.score_gradients, *_apart(arrays[:_BACKWARD]), like=_scores_like, spec=spec, **others),)


def _on_cuda(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    (size, value_size), dtype = (x.shape[-1] for x in arrays[1:3]), arrays[0].dtype.name
    others = given.named(arrays[_FORWARD:])
    common_prefix = others.pop("common_prefix", None)
    served = _hopper_takes(spec)
    contract = split_attention_contract(size, dtype, value_size) if served else None
    if contract is not None and cuda_architecture() == HOPPER:
        note(hopper.attention, *_of_cache(arrays, given), arrays=arrays)
        fixed = {**_of_spec(spec), "common_prefix": common_prefix}
        return run(hopper.attention, *arrays[:_FORWARD], like=attention_like, contract=contract, **fixed, **others)
    note(triton.attention, *_of_cache(arrays, given), arrays=arrays)
    arrays, valid = _within(arrays, given)
    own, others = _apart(arrays[:_FORWARD]), given.named(arrays[_FORWARD:])
    return poison(valid, *run(triton.attention, *own, like=attention_like, **_for_triton(arrays, spec), **others))


def _gradients_on_cuda(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    (size, value_size), dtype = (x.shape[-1] for x in arrays[1:3]), arrays[0].dtype.name
    others = given.named(arrays[_BACKWARD:])
    served = others.keys() <= {"slopes"} and _hopper_takes(spec)
    contract = attention_gradient_contract(size, dtype, value_size) if served else None
    if contract is not None and cuda_architecture() == HOPPER:
        fixed, own = _of_spec(spec), arrays[:_BACKWARD]
        return run(hopper.attention_gradients, *own, like=gradients_like, contract=contract, **fixed, **others)
    own, options = _apart(arrays[:_BACKWARD]), _for_triton(arrays, spec)
    return run(triton.gradients, *own, like=gradients_like, **options, **others)


def _score_gradients_on_cuda(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    options = {**_for_triton(arrays, spec), **given.named(arrays[_BACKWARD:])}
    return (run(triton.score_gradients, *_apart(arrays[:_BACKWARD]), like=_scores_like, **options),)


def _of_cache(arrays: Arrays, given: Given) -> tuple[EightBitContract, ...]:
    """Returns the contract of keys of 8 bits, if they are."""
    return (eight_bit_contract(arrays[1].dtype.name),) if given.key_scale else ()


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


def _within(arrays: Arrays, given: Given) -> tuple[Arrays, jax.Array]:
    """Returns the arrays of a call with limits and pages that exist, and the (B,) mask of sequences that had such."""
    query, key, value, limits, *others = arrays
    valid = limits[:, 1] >= 0
    if given.page_table:  # the first of the others
        table, *others = others
        valid = valid & pages_inside(table, limits[:, 2], key.shape[1], key.shape[0])
        others = [jnp.clip(table, 0, max(0, key.shape[0] - 1)), *others]
    return (query, key, value, jnp.maximum(limits, 0), *others), valid


def _apart(arrays: Arrays) -> Arrays:
    """Returns the arrays of a call with the limits as three arrays: offsets, lengths of queries and of keys."""
    *others, limits = arrays
    return (*others, *(limits[:, i] for i in range(3)))


def _for_triton(arrays: Arrays, spec: AttentionSpec) -> dict[str, Any]:
    query, key, value = arrays[:3]
    contract = mma_attention_contract(query.dtype.name, max(key.shape[-1], value.shape[-1]))
    return {"contract": contract, **_of_spec(spec)}


def _of_spec(spec: AttentionSpec) -> dict[str, Any]:
    return {"scale": spec.scale, "causal": spec.causal, "window": spec.window, "soft_cap": spec.soft_cap}


def _hopper_takes(spec: AttentionSpec) -> bool:
    return hopper.supports_scale(spec.scale) and hopper.supports_cap(spec.scale, spec.soft_cap)


ATTENTION: Final[dict[str, Kernel]] = {"cpu": _on_cpu, "cuda": _on_cuda}
"""Attention of contiguous caches, or of paged ones; `given` says which arrays stand behind the others."""

GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _gradients_on_cpu, "cuda": _gradients_on_cuda}
"""The backward pass of attention to a contiguous cache."""

SCORE_GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _score_gradients_on_cpu, "cuda": _score_gradients_on_cuda}
"""The gradients of what is added to the scores."""
