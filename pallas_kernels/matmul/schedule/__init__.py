"""Schedules, which affect only speed: tables as data, without JAX."""
