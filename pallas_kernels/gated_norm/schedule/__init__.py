"""Schedules of the gated RMSNorm."""
