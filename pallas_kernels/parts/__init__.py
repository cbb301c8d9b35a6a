"""What kernels are built from."""
