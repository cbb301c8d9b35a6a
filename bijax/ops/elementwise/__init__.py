"""Element-wise functions as one operation."""
