"""The largest numbers of rows and their indices."""
