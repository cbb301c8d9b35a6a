"""Parts of Mosaic GPU kernels for Hopper."""
