"""Batch-invariant JAX: a row gets the same bits whatever else is in the batch."""

from bijax import ops as ops
from bijax.ops.matmul import matmul as matmul
from pallas_kernels.errors import UnsupportedError as UnsupportedError
