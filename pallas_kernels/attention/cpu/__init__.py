"""Attention over fixed blocks of keys, forward and backward, from contiguous and paged caches."""

from pallas_kernels.attention.cpu.launch import attention as attention
from pallas_kernels.attention.cpu.launch import gradients as gradients
from pallas_kernels.attention.cpu.launch import score_gradients as score_gradients
