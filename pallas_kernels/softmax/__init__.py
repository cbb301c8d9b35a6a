"""The softmax family, cross entropy included."""
