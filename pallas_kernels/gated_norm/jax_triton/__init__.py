"""The gated RMSNorm in Triton, through jax-triton, for NVIDIA GPUs from Ampere on."""
