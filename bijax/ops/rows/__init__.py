"""Reductions of rows: sums, means, variances, the softmax family and losses."""
