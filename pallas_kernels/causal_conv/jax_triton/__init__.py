"""Causal depthwise convolution in Triton kernels, through jax-triton, for NVIDIA GPUs from Ampere on."""
