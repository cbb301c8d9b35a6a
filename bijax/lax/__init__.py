"""Invariant forms of JAX's own primitives, with their operands and parameters."""
