"""The gated delta rule of linear attention: whole sequences, their continuation, and gradients."""
