"""Schedules of the kernels for Hopper GPUs."""
