"""Schedules, which affect speed but never bits. They may depend on the batch; contracts may not."""
