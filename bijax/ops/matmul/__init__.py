"""Products: plain, fused and gated, with their derivatives."""
