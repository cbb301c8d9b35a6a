"""Element-wise programs on whole vectors, on any platform."""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.parts.xla.lanes import run_flat
from pallas_kernels.parts.xla.tiles import Program


def elementwise(
    *arrays: jax.Array, program: Program, functions: ElementwiseContract = XLA_FUNCTIONS
) -> tuple[jax.Array, ...]:
    """Applies an element-wise program to arrays of the same shape.

    Args:
        *arrays: Arrays of one shape and any dtypes, at least one.
        program: Maps arrays of a shape (T, 128) elementwise to results of that shape.
        functions: How exp and similar functions are computed.

    Returns:
        One array of the arguments' shape for each result of the program.

    Guarantee: row-invariant, each element being a row of its own.

    Example:
        >>> elementwise(jnp.array([0.0, 1.0, 2.0]), program=lambda x: (x * x + 1,))[0].tolist()
        [1.0, 2.0, 5.0]
    """
    honour("elementwise", functions, XLA_FUNCTIONS)
    shape = arrays[0].shape
    if 0 in shape:
        results = jax.eval_shape(program, *(jax.ShapeDtypeStruct((1, 1), a.dtype) for a in arrays))
        return tuple(jnp.zeros(shape, r.dtype) for r in results)
    return run_flat(program, *arrays)


def elementwise_on_gpu(*arrays: jax.Array, program: Program, functions: ElementwiseContract) -> tuple[jax.Array, ...]:
    """Applies an element-wise program directly: fences in its lowering preserve the bits in any fusion."""
    honour("elementwise", functions, XLA_FUNCTIONS)
    return program(*arrays)
