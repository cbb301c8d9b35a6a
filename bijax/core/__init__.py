"""The parts of every operation: primitives, recorded contracts, targets, tags, checks."""
