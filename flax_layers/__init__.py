"""Flax layers and models built from batch-invariant operations."""
