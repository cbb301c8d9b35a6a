"""Matmul on the CPU."""

from pallas_kernels.matmul.cpu.launch import honours_contract as honours_contract
from pallas_kernels.matmul.cpu.launch import matmul as matmul
