"""Combining windows of updates into an array, in the order of their indices."""
