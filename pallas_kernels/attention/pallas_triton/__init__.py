"""Attention on any NVIDIA GPU."""

from pallas_kernels.attention.pallas_triton.launch import attention as attention
from pallas_kernels.attention.pallas_triton.launch_backward import gradients as gradients
from pallas_kernels.attention.pallas_triton.launch_backward import score_gradients as score_gradients
