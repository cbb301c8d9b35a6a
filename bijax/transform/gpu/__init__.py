"""What stops XLA:GPU's rewrites: fences."""
