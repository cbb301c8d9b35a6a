"""The experts of tokens in a Triton kernel, through jax-triton, for NVIDIA GPUs from Ampere on."""
