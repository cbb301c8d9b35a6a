"""Attention: dense, paged, with splits of the keys; its options, checks and derivative."""
