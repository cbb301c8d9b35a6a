"""Attention on any NVIDIA GPU."""

from pallas_kernels.ops.attention.triton.launch import attention as attention
from pallas_kernels.ops.attention.triton.launch import gradients as gradients
