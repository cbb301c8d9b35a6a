"""Schedules: what makes a program fast and cannot change a bit. They may depend on the batch; contracts may not."""
