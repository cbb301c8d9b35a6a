"""The gated delta rule and the causal convolution of linear attention."""
