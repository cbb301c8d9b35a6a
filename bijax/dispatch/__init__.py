"""Chooses the kernel and the contract of a call when a program is lowered."""
