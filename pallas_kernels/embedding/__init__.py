"""Sums of rows by the id that they belong to."""
