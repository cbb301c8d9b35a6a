"""Sums of rows by id."""
