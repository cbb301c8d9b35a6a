"""Attention by platform, architecture, dtype and head size, never by the number of queries or sequences."""

import functools
from typing import TYPE_CHECKING, Any, Final

import jax

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
    return run(cpu.attention, *arrays, like=tiled.attention, spec=spec)


def portable(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    """Runs attention on any GPU."""
    note(tiled.attention, XLA_FUNCTIONS, arrays=arrays)
    return run(tiled.attention, *arrays, like=tiled.attention, spec=spec, dot=fused_chain_dot)


def _on_cuda(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    contract = hopper_contract(arrays[0].shape[-1], arrays[0].dtype.name, spec.scale)
    if contract is None or cuda_architecture() != HOPPER:
        return portable(*arrays, spec=spec)
    mask: dict[str, Any] = {"causal": spec.causal, "window": spec.window}
    portable_form = functools.partial(_as_portable, spec)
    return run(hopper.attention, *arrays, like=portable_form, contract=contract, scale=spec.scale, **mask)


def _as_portable(spec: AttentionSpec, *arrays: jax.Array, **_: Any) -> Arrays:
    return tiled.attention(*arrays, spec=spec, dot=fused_chain_dot)


def hopper_contract(head_size: int, dtype: str, scale: float) -> SplitAttentionContract | None:
    """Returns the contract of attention on a Hopper GPU; None for what the portable program serves there."""
    return split_attention_contract(head_size, dtype) if hopper.supports_scale(scale) else None


def _gradients_on_cpu(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    return run(cpu.gradients, *arrays, like=tiled.gradients, spec=spec)


def _gradients_on_cuda(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    query = arrays[0]
    contract = attention_gradient_contract(query.shape[-1], query.dtype.name)
    if contract is None or not hopper.supports_scale(spec.scale) or cuda_architecture() != HOPPER:
        return run(tiled.gradients, *arrays, like=tiled.gradients, spec=spec, dot=fused_chain_dot)
    options: dict[str, Any] = {"scale": spec.scale, "causal": spec.causal, "window": spec.window}
    return run(hopper.attention_gradients, *arrays, like=_as_given, contract=contract, **options)


def _as_given(*arrays: jax.Array, **_: Any) -> Arrays:
    """Gradients have the shapes and dtypes of queries, keys and values."""
    return arrays[:3]


ATTENTION: Final[dict[str, Kernel]] = {"cpu": _on_cpu, "cuda": _on_cuda}
"""Attention of contiguous caches, or of paged ones with a page table behind the other arrays."""

GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _gradients_on_cpu, "cuda": _gradients_on_cuda}
"""The backward pass of attention to a contiguous cache."""
