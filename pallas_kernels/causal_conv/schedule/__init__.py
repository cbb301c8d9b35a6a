"""Schedules of the causal convolution."""
