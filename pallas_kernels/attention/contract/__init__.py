"""What fixes the bits of attention."""
