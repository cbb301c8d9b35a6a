"""Drawing tokens from rows of logits."""
