"""Attention by platform, architecture, dtype and head size, never by the number of queries or sequences."""

from typing import Any, Final

import jax

from bijax.ops._architecture import HOPPER, cuda_architecture
from bijax.ops._primitive import Arrays, Kernel
from pallas_kernels.attention import AttentionSpec, cpu, tiled
from pallas_kernels.contract import SplitAttentionContract, attention_gradient_contract, split_attention_contract
from pallas_kernels.ops.attention import hopper


def _on_cpu(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    return cpu.attention(*arrays, spec=spec)


def portable(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    """Runs attention on any platform."""
    return tiled.attention(*arrays, spec=spec)


def _on_cuda(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    contract = hopper_contract(arrays[0].shape[-1], arrays[0].dtype.name, spec.scale)
    if contract is None or cuda_architecture() != HOPPER:
        return portable(*arrays, spec=spec)
    mask: dict[str, Any] = {"causal": spec.causal, "window": spec.window}
    return hopper.attention(*arrays, contract=contract, scale=spec.scale, **mask)


def hopper_contract(head_size: int, dtype: str, scale: float) -> SplitAttentionContract | None:
    """Returns the contract of attention on a Hopper GPU; None for what the portable program serves there."""
    return split_attention_contract(head_size, dtype) if hopper.supports_scale(scale) else None


def _gradients_on_cpu(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    return cpu.gradients(*arrays, spec=spec)


def _gradients_on_cuda(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    query = arrays[0]
    contract = attention_gradient_contract(query.shape[-1], query.dtype.name)
    if contract is None or not hopper.supports_scale(spec.scale) or cuda_architecture() != HOPPER:
        return tiled.gradients(*arrays, spec=spec)
    mask: dict[str, Any] = {"causal": spec.causal, "window": spec.window}
    return hopper.attention_gradients(*arrays, contract=contract, scale=spec.scale, **mask)


ATTENTION: Final[dict[str, Kernel]] = {"cpu": _on_cpu, "cuda": _on_cuda}
"""Attention of contiguous caches, or of paged ones with a page table behind the other arrays."""

GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _gradients_on_cpu, "cuda": _gradients_on_cuda}
"""The backward pass of attention to a contiguous cache."""
