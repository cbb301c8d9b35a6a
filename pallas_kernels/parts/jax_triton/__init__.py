"""Parts of the kernels that are written in Triton and called through jax-triton, for NVIDIA GPUs from Ampere on."""
