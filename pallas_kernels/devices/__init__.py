"""Kernels that several GPUs run together."""
