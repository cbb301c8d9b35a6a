"""Batch-invariant operations, differentiable and under every JAX transformation."""

from bijax.ops.matmul import matmul as matmul
from bijax.ops.matmul import weight_gradient as weight_gradient
