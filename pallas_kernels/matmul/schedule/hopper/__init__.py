"""Schedules of products on Hopper."""
