"""A choice between arrays that is traced at once.

`jax.numpy` wraps its functions and operators in `jax.jit`, which traces each one anew for new shapes, 1 to 3 ms a call:
half the time to trace a kernel of some dozens of operations, and so a part of the first call of every program. Kernels
that most programs have are therefore written with `jax.lax`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def where(condition: jax.Array, x: jax.Array | float, y: jax.Array | float) -> jax.Array:
    """Returns `jax.numpy.where` of arrays of one dtype; a number takes the dtype of the other operand.

    Args:
        condition: bool, of a shape that is broadcast with the others.
        x: Chosen where the condition is true; an array or a number.
        y: Chosen elsewhere; an array or a number. At least one of the two is an array.

    Example:
        >>> where(jnp.array([True, False]), jnp.array([1.0, 2.0]), 0.0).tolist()
        [1.0, 0.0]
    """
    dtype = next(a.dtype for a in (x, y) if isinstance(a, jax.Array))
    arrays = [a if isinstance(a, jax.Array) else np.asarray(a, dtype) for a in (x, y)]
    shape = jnp.broadcast_shapes(condition.shape, *(a.shape for a in arrays))
    return lax.select(*(jnp.broadcast_to(a, shape) for a in (condition, *arrays)))
