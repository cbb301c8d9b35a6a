"""Collectives over several devices that add in a fixed order."""
