"""What kernels need of the process: caches, comparisons at first use, settings of their own."""
