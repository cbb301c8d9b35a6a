"""The experts of tokens from the router's products."""
