"""Process-wide services for kernels: caches, comparisons at first use, and the library's own settings."""
