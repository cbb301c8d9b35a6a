"""`bijax demo`: a real model, computed in many ways, first with plain JAX and then with bijax; every bit compared."""
