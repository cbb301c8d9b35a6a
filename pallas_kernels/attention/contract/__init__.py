"""Contracts of attention, which fix its bits."""
