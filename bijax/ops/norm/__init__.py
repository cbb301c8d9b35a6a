"""Normalisation of rows and of heads."""
