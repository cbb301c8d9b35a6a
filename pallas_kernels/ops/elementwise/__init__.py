"""Element-wise programs."""
