"""Functions of one matrix on stacks of matrices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _at_once(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    return jax.vmap(function)(*arrays)


def one_by_one(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Applies a function to the entries of arrays along their first axis, in a loop."""
    return lax.map(lambda entries: function(*entries), arrays)


def over_stack(function: Callable[..., Any], *arrays: jax.Array, over: Callable[..., Any] = _at_once) -> Any:
    """Applies a function of one matrix, and of its associated arrays, to every matrix of a stack.

    Args:
        function: Maps arrays to arrays.
        *arrays: Arrays with the axes of the stack in front. The first has two more axes.
        over: Applies a function along the first axis of arrays; by default, to all matrices at once.
    """
    stack = arrays[0].shape[:-2]
    if not stack:
        return function(*arrays)
    entries = [x.shape[len(stack) :] for x in arrays]
    if math.prod(stack) == 0:
        one = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(entries, arrays, strict=True))
        return jax.tree.map(lambda r: jnp.zeros((*stack, *r.shape), r.dtype), jax.eval_shape(function, *one))
    flat = (x.reshape(math.prod(stack), *shape) for shape, x in zip(entries, arrays, strict=True))
    return jax.tree.map(lambda r: r.reshape(*stack, *r.shape[1:]), over(function, *flat))


def at(a: jax.Array, j: jax.Array, axis: int) -> jax.Array:
    """A row (axis 0) or a column (axis 1) of a matrix, which keeps its two axes; an index counts from the start."""
    return lax.dynamic_slice_in_dim(a, j, 1, axis, allow_negative_indices=False)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two matrices at full precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def adjoint(a: jax.Array) -> jax.Array:
    """Returns the conjugate transpose of a matrix."""
    return a.conj().T if jnp.iscomplexobj(a) else a.T


def blocks(n: int) -> tuple[int, int]:
    """Returns the number of blocks of a factorisation and their columns; up to 64 columns are one block."""
    width = n if n <= 64 else 32
    return -(-n // width), width
