"""RMSNorm times silu of a gate, the norm of the outputs of linear attention."""
