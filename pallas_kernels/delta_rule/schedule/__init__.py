"""Schedules, which only affect speed: tables as data, without JAX."""
