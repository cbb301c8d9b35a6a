"""Attention by platform, architecture, dtype and head size, never by the number of queries or sequences."""

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from bijax.ops._architecture import HOPPER, cuda_architecture
from bijax.ops._contracts import note, run
from bijax.ops._cuda_dot import fused_chain_dot
from bijax.ops._on_first_use import on_first_use
from bijax.ops._primitive import Arrays, Kernel
from pallas_kernels.attention import AttentionSpec, cpu, tiled
from pallas_kernels.contract import (
    XLA_FUNCTIONS,
    SplitAttentionContract,
    attention_gradient_contract,
    split_attention_contract,
)

if TYPE_CHECKING:
    from pallas_kernels.ops.attention import hopper
else:
    hopper = on_first_use("pallas_kernels.ops.attention.hopper")


def _on_cpu(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    note(cpu.attention, XLA_FUNCTIONS, arrays=arrays)
    return run(cpu.attention, *arrays, like=attention_like, spec=spec)


def portable(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    """Runs attention on any GPU."""
    note(tiled.attention, XLA_FUNCTIONS, arrays=arrays)
    return run(tiled.attention, *arrays, spec=spec, dot=fused_chain_dot)


def _on_cuda(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    contract = hopper_contract(arrays[0].shape[-1], arrays[0].dtype.name, spec.scale)
    if contract is None or cuda_architecture() != HOPPER:
        return portable(*arrays, spec=spec)
    mask: dict[str, Any] = {"causal": spec.causal, "window": spec.window}
    return run(hopper.attention, *arrays, like=attention_like, contract=contract, scale=spec.scale, **mask)


def attention_like(query: jax.Array, *_: jax.Array, **__: Any) -> Arrays:
    """Returns arrays of the shapes of the outputs and the log-sum-exp."""
    return jnp.zeros(query.shape, query.dtype), jnp.zeros(query.shape[:-1], jnp.float32)


def gradients_like(query: jax.Array, key: jax.Array, value: jax.Array, *_: jax.Array, **__: Any) -> Arrays:
    """Returns arrays of the shapes of the gradients."""
    return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)


def hopper_contract(head_size: int, dtype: str, scale: float) -> SplitAttentionContract | None:
    """Returns the contract of attention on a Hopper GPU; None for what the portable program serves there."""
    return split_attention_contract(head_size, dtype) if hopper.supports_scale(scale) else None


def _gradients_on_cpu(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    note(cpu.gradients, XLA_FUNCTIONS, arrays=arrays)
    return run(cpu.gradients, *arrays, like=gradients_like, spec=spec)


def _gradients_on_cuda(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    query = arrays[0]
    contract = attention_gradient_contract(query.shape[-1], query.dtype.name)
    if contract is None or not hopper.supports_scale(spec.scale) or cuda_architecture() != HOPPER:
        note(tiled.gradients, XLA_FUNCTIONS, arrays=arrays)
        return run(tiled.gradients, *arrays, spec=spec, dot=fused_chain_dot)
    mask: dict[str, Any] = {"causal": spec.causal, "window": spec.window}
    return run(hopper.attention_gradients, *arrays, like=gradients_like, contract=contract, scale=spec.scale, **mask)


ATTENTION: Final[dict[str, Kernel]] = {"cpu": _on_cpu, "cuda": _on_cuda}
"""Attention of contiguous caches, or of paged ones with a page table behind the other arrays."""

GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _gradients_on_cpu, "cuda": _gradients_on_cuda}
"""The backward pass of attention to a contiguous cache."""
