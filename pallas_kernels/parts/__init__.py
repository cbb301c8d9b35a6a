"""Building blocks of kernels."""
