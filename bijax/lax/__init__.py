"""Invariant versions of JAX's primitives, with their operands and parameters."""
