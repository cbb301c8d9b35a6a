"""Grouped matrix products: rows sorted by group, with separate weights for each group."""
