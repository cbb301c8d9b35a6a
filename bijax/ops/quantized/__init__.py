"""Quantising of rows, and products of 8 bit operands."""
