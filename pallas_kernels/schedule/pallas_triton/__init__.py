"""Schedules of the Triton kernels, for GPUs before Hopper and calls that the Hopper kernels do not serve."""
