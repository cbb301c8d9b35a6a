"""Connects requests to JAX's lowering: their state, the tags of equations, and the function that wraps JAX's.

- `state`: the active request of a thread, and the tags of equations.
- `lowering`: transforms a program before JAX lowers it, and each call of a primitive.
- `entered`, `callbacks`, `compiled`: primitives of other libraries, Python callbacks, programs compiled earlier.
- `_jax_private`: everything private of JAX that the transform needs.
"""
