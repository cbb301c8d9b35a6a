"""The command `bijax test-deterministic`: the same request many times, beside other requests that change."""
