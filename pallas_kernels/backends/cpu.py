"""Kernels for CPUs."""

from typing import Final

from pallas_kernels.contract import chain_contract, chunk_contract
from pallas_kernels.registry import Kernel

_ON: Final = "cpu"
_OPS: Final = "pallas_kernels.ops"

KERNELS: Final = (
    Kernel("matmul", _ON, f"{_OPS}.matmul.cpu.products:matmul", chain_contract),
    Kernel("weight_gradient", _ON, f"{_OPS}.matmul.cpu.products:weight_gradient", chunk_contract()),
)
