"""Mixtures of experts: routing, scatter, products of groups of rows, gather."""
