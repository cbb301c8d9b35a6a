"""What fixes the speed alone: tables as data, without JAX."""
