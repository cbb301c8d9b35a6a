"""The command `bijax test-deterministic`: the same request many times, among other requests that vary."""
