"""Batch-invariant JAX: a row gets the same bits whatever else is in the batch."""
