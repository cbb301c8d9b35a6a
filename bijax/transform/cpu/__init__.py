"""Prevents XLA:CPU's rewrites: fences, hidden constants, reshapes and divisions, updates of arrays in place."""
