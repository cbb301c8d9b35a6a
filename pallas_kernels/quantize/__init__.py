"""Quantisation of rows to 8 bits with a scale each: of arrays, norms and SwiGLU."""
