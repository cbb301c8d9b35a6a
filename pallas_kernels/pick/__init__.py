"""Rows copied from where they stand to where they are needed."""
