"""The gated delta rule on Hopper GPUs: Pallas Mosaic GPU kernels."""
