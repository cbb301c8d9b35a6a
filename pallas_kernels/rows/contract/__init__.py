"""Contracts of row sums."""
