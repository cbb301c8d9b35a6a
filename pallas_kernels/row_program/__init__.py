"""Element-wise code of rows and the reductions in it, as one kernel."""
