"""Where the rows of experts stand: exact integers, the same on every platform."""
