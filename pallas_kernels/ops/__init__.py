"""Kernels, a folder for each operation."""
