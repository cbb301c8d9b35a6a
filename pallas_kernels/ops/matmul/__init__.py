"""Matmul."""
