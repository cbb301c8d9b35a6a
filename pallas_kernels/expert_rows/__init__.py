"""The layout of expert rows: exact integers, the same on every platform."""
