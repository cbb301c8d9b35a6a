"""The gated delta rule in Triton kernels, through jax-triton, for NVIDIA GPUs from Ampere on."""
