"""What portable programs and those for CPUs are built from."""
