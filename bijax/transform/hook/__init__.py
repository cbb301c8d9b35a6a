"""How a request reaches JAX's lowering: its state, the tags of equations, and the function in front of JAX's own.

- `state`: the request in force in a thread, and the tags of equations.
- `lowering`: what is done to a program before JAX lowers it, and to each call of a primitive.
- `entered`, `callbacks`, `compiled`: primitives of other libraries, Python callbacks, programs compiled before.
- `_jax_private`: everything private of JAX that the transform needs.
"""
