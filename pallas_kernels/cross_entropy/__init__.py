"""Cross entropy of logits against integer labels."""
