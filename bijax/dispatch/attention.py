"""Attention by platform, architecture, dtype and head size, never by the number of queries or sequences."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from bijax.core.architecture import HOPPER, cuda_architecture
from bijax.core.contracts import note, run
from bijax.core.on_first_use import on_first_use
from bijax.core.primitive import Arrays, Kernel
from pallas_kernels.contract import (
    XLA_FUNCTIONS,
    SplitAttentionContract,
    attention_gradient_contract,
    mma_attention_contract,
    split_attention_contract,
)
from pallas_kernels.ops.attention import cpu
from pallas_kernels.ops.attention.cpu import AttentionSpec

if TYPE_CHECKING:
    from pallas_kernels.ops.attention import hopper, triton
else:
    hopper = on_first_use("pallas_kernels.ops.attention.hopper")
    triton = on_first_use("pallas_kernels.ops.attention.triton")


@dataclass(frozen=True)
class Given:
    """Which arrays stand behind the others of a call, in this order.

    Attributes:
        table: A page table.
        bias: A bias of the scores.
        mask: A mask.
    """

    table: bool = False
    bias: bool = False
    mask: bool = False

    def named(self, arrays: Arrays) -> dict[str, jax.Array]:
        """Returns the arrays by the names that kernels know them by."""
        there = {"page_table": self.table, "bias": self.bias, "mask": self.mask}
        return dict(zip((name for name in there if there[name]), arrays, strict=True))


_FORWARD: Final = 6
"""Arrays of every call: query, key, value, offsets, lengths of queries and of keys."""

_BACKWARD: Final = 9
"""The same with the result, the log-sum-exp and the cotangent."""


def attention_like(query: jax.Array, *_: Any, **__: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of attention's results."""
    return jnp.zeros_like(query), jnp.zeros(query.shape[:3], jnp.float32)


def gradients_like(query: jax.Array, key: jax.Array, value: jax.Array, *_: Any, **__: Any) -> Arrays:
    """Returns arrays of the shapes and dtypes of its gradients."""
    return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)


def _on_cpu(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    note(cpu.attention, XLA_FUNCTIONS, arrays=arrays)
    return run(cpu.attention, *arrays[:_FORWARD], like=attention_like, spec=spec, **given.named(arrays[_FORWARD:]))


def _gradients_on_cpu(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    note(cpu.gradients, XLA_FUNCTIONS, arrays=arrays)
    return run(cpu.gradients, *arrays[:_BACKWARD], like=gradients_like, spec=spec, **given.named(arrays[_BACKWARD:]))


def _on_cuda(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    size, dtype = arrays[0].shape[-1], arrays[0].dtype.name
    others = given.named(arrays[_FORWARD:])
    mask: dict[str, Any] = {"scale": spec.scale, "causal": spec.causal, "window": spec.window}
    contract = None if given.bias or given.mask else hopper_contract(size, dtype, spec.scale)
    if contract is not None and cuda_architecture() == HOPPER:
        return run(hopper.attention, *arrays[:_FORWARD], like=attention_like, contract=contract, **mask, **others)
    portable = mma_attention_contract(dtype, size)
    return run(triton.attention, *arrays[:_FORWARD], like=attention_like, contract=portable, **mask, **others)


def _gradients_on_cuda(*arrays: jax.Array, spec: AttentionSpec, given: Given) -> Arrays:
    size, dtype = arrays[0].shape[-1], arrays[0].dtype.name
    others = given.named(arrays[_BACKWARD:])
    mask: dict[str, Any] = {"scale": spec.scale, "causal": spec.causal, "window": spec.window}
    contract = None if others or not hopper.supports_scale(spec.scale) else attention_gradient_contract(size, dtype)
    if contract is not None and cuda_architecture() == HOPPER:
        return run(hopper.attention_gradients, *arrays, like=gradients_like, contract=contract, **mask)
    portable = mma_attention_contract(dtype, size)
    return run(triton.gradients, *arrays[:_BACKWARD], like=gradients_like, contract=portable, **mask, **others)


def hopper_contract(head_size: int, dtype: str, scale: float) -> SplitAttentionContract | None:
    """Returns the contract of attention on a Hopper GPU; None for what the Triton kernel serves there."""
    return split_attention_contract(head_size, dtype) if hopper.supports_scale(scale) else None


ATTENTION: Final[dict[str, Kernel]] = {"cpu": _on_cpu, "cuda": _on_cuda}
"""Attention of contiguous caches, or of paged ones; `given` says which arrays stand behind the others."""

GRADIENTS: Final[dict[str, Kernel]] = {"cpu": _gradients_on_cpu, "cuda": _gradients_on_cuda}
"""The backward pass of attention to a contiguous cache."""
