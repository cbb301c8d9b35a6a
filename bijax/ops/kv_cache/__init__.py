"""Writing keys and values into caches."""
