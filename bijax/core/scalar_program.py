"""Programs of scalars, such as those that JAX's scatters and reductions carry, on whole arrays."""

import math
from collections.abc import Callable

import jax

ScalarProgram = Callable[..., tuple[jax.Array, ...]]
"""Maps scalars to a tuple of scalars."""


def on_arrays(program: ScalarProgram, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Applies a program of scalars to every element.

    Args:
        program: The program. It is traced here on arrays with one axis for the elements.
        *arrays: One array for each scalar, all of one shape.

    Returns:
        One array of that shape for each result of the program.
    """
    shape = arrays[0].shape
    size = math.prod(shape)
    return tuple(r.reshape(shape) for r in jax.vmap(program)(*(a.reshape(size) for a in arrays)))
