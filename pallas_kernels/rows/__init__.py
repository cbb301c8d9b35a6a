"""Sums over rows and over the rows of a batch."""
