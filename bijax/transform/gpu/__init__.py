"""Prevents XLA:GPU's rewrites: fences."""
