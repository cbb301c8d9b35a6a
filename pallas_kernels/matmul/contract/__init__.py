"""What fixes the bits of products."""
