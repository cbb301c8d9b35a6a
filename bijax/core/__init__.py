"""What every operation is made of: primitives, contracts that are run, targets, tags, checks."""
