"""Contracts of matrix products: the order of their sums."""
