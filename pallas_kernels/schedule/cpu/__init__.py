"""Schedules of the programs for CPUs, which are those of any platform where they are portable."""
