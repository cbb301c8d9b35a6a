"""Schedules of the Triton kernels, for GPUs older than Hopper and what Hopper's kernels do not serve."""
