"""What fixes the bits of sums of rows."""
