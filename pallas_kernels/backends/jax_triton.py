"""Kernels in Triton, called through jax-triton, for NVIDIA GPUs from Ampere on."""

from typing import Final

from pallas_kernels.contract import MmaAttentionContract, mma_attention_contract
from pallas_kernels.packages import Packages
from pallas_kernels.registry import Kernel

_ON: Final = "mma"
_OPS: Final = "pallas_kernels"
_PACKAGES: Final = Packages(("triton", "jax-triton", "jax-cuda13-plugin|jax-cuda12-plugin"), "cuda13")


def _attention(widths: tuple[int, str, int]) -> MmaAttentionContract:
    size, dtype, value_size = widths
    return mma_attention_contract(dtype, max(size, value_size), version=2)


def _kernel(operation: str, function: str) -> Kernel:
    load = f"{_OPS}.attention.jax_triton:{function}"
    return Kernel(operation, _ON, load, _attention, packages=_PACKAGES, takes_target=True)


KERNELS: Final = (
    _kernel("attention", "attention"),
    _kernel("attention_gradients", "gradients"),
    _kernel("attention_score_gradients", "score_gradients"),
)
