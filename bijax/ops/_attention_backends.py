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
from pallas_kernels.contract import XLA_FUNCTIONS, SplitAttentionContract, split_attention_contract

if TYPE_CHECKING:
    from pallas_kernels.ops.attention import hopper
else:
    hopper = on_first_use("pallas_kernels.ops.attention.hopper")


def _on_cpu(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    note(cpu.attention, XLA_FUNCTIONS, arrays=arrays)
    return run(cpu.attention, *arrays, like=_anywhere, spec=spec)


def portable(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    """Runs attention on any GPU."""
    note(tiled.attention, XLA_FUNCTIONS, arrays=arrays)
    return run(tiled.attention, *arrays, like=_anywhere, spec=spec, dot=fused_chain_dot)


def _on_cuda(*arrays: jax.Array, spec: AttentionSpec) -> Arrays:
    contract = hopper_contract(arrays[0].shape[-1], arrays[0].dtype.name, spec.scale)
    if contract is None or cuda_architecture() != HOPPER:
        return portable(*arrays, spec=spec)
    mask: dict[str, Any] = {"causal": spec.causal, "window": spec.window}
    like = functools.partial(_anywhere, spec=spec)
    return run(hopper.attention, *arrays, like=like, contract=contract, scale=spec.scale, **mask)


def _anywhere(*arrays: jax.Array, spec: AttentionSpec, **_: Any) -> Arrays:
    return tiled.attention(*arrays, spec=spec, dot=fused_chain_dot)


def hopper_contract(head_size: int, dtype: str, scale: float) -> SplitAttentionContract | None:
    """Returns the contract of attention on a Hopper GPU; None for what the portable program serves there."""
    return split_attention_contract(head_size, dtype) if hopper.supports_scale(scale) else None


ATTENTION: Final[dict[str, Kernel]] = {"cpu": _on_cpu, "cuda": _on_cuda}
"""Attention of contiguous caches, or of paged ones with a page table behind the other arrays."""
