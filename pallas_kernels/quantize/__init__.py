"""Rows of 8 bits with a scale each, of arrays as they are, of norms and of SwiGLU."""
