"""Products of rows that are sorted by group, each group having weights of its own."""
