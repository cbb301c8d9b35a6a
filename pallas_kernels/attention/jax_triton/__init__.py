"""Attention written in Triton, for NVIDIA GPUs from Ampere on."""

from pallas_kernels.attention.jax_triton.launch import attention as attention
from pallas_kernels.attention.jax_triton.launch_backward import gradients as gradients
from pallas_kernels.attention.jax_triton.launch_backward import score_gradients as score_gradients
