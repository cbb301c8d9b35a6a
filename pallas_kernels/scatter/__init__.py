"""Scatters that combine windows of updates into an array, in index order."""
