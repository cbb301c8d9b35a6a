"""The command `bijax test-deterministic`: the same request many times, in changing company."""
