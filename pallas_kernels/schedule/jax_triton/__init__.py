"""Schedules of kernels through jax-triton that several operations share."""
