"""Parts of Triton kernels, for any NVIDIA GPU."""
