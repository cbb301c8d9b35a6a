"""Reductions over sliding windows, and the selections of pooling."""
