"""Cumulative sums, products and log-sum-exps."""
