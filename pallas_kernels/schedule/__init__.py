"""Schedules: what makes a program fast and cannot move a bit. They may depend on the batch; contracts may not."""
