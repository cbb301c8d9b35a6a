"""Schedules of the CPU programs, also used by portable programs on any platform."""
