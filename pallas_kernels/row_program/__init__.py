"""Element-wise code and reductions of rows, fused into one kernel."""
