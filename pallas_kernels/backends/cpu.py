"""Kernels for CPUs."""

from typing import Final

from pallas_kernels.contract import XLA_FUNCTIONS, attention_contract, chain_contract, chunk_contract
from pallas_kernels.registry import Kernel

_ON: Final = "cpu"
_OPS: Final = "pallas_kernels"
_ATTENTION: Final = attention_contract()

KERNELS: Final = (
    Kernel("matmul", _ON, f"{_OPS}.matmul.cpu.products:matmul", chain_contract),
    Kernel("weight_gradient", _ON, f"{_OPS}.matmul.cpu.products:weight_gradient", chunk_contract()),
    Kernel("attention", "cpu", f"{_OPS}.attention.cpu:attention", _ATTENTION, XLA_FUNCTIONS),
    Kernel("attention_gradients", "cpu", f"{_OPS}.attention.cpu:gradients", _ATTENTION, XLA_FUNCTIONS),
    Kernel("attention_score_gradients", "cpu", f"{_OPS}.attention.cpu:score_gradients", _ATTENTION, XLA_FUNCTIONS),
)
