"""Reductions by a user's function, with the operands and parameters of JAX's own primitives.

XLA runs the function inside its reduction, in an order that depends on the shape. Here it is applied to whole arrays,
as part of the surrounding program, in an order that depends only on the reduced axes.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.contracts import note
from bijax.core.scalar_program import ScalarProgram, on_arrays
from pallas_kernels.contract import FoldContract, PairContract
from pallas_kernels.parts.xla.positions import Window, fold_positions
from pallas_kernels.parts.xla.tiles import isolate

Arrays = tuple[jax.Array, ...]


def reduce(*values: jax.Array, program: ScalarProgram, dimensions: Sequence[int]) -> Arrays:
    """Reduces along axes by a function, as a tree over neighbours.

    The elements along the axes, in row-major order, are combined pairwise, and so are the results, until one is left;
    if their number is odd, the last one waits. The initial value is combined with the result, as the left operand.

    Args:
        *values: n arrays of one shape, then n scalars of their dtypes, the initial values.
        program: The function, associative: maps 2 n scalars to n scalars.
        dimensions: Axes to reduce; if empty, the arrays are returned unchanged.

    Returns:
        n arrays without the axes.

    Guarantee: row-invariant, if the program is lowered so. (Rows are the elements of one result.)

    Example:
        >>> largest = lambda x, y: (jnp.where(x > y, x, y),)
        >>> reduce(jnp.array([[1.0, 5.0, 3.0]]), jnp.float32(0), program=largest, dimensions=(1,))[0].tolist()
        [5.0]
    """
    operands, initial = _halves(values)
    if not dimensions:
        return operands
    note(reduce, PairContract(), arrays=operands)
    kept = [a for a in range(operands[0].ndim) if a not in dimensions]
    shape = tuple(operands[0].shape[a] for a in kept)
    length = math.prod(operands[0].shape[a] for a in dimensions)
    level = isolate(*(x.transpose((*sorted(dimensions), *kept)).reshape(length, math.prod(shape)) for x in operands))
    first = tuple(jnp.broadcast_to(x, shape) for x in initial)
    if length == 0:
        return first
    while length > 1:
        pairs = length // 2 * 2
        neighbours = (lax.slice_in_dim(x, start, pairs, 2) for start in (0, 1) for x in level)
        combined = isolate(*on_arrays(program, *neighbours))
        rest = [lax.slice_in_dim(x, pairs, length) for x in level]
        level = tuple(lax.concatenate(parts, 0) for parts in zip(combined, rest, strict=True))
        length = level[0].shape[0]
    return isolate(*on_arrays(program, *first, *(x.reshape(shape) for x in level)))


def reduce_window(
    *values: jax.Array,
    program: ScalarProgram,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> Arrays:
    """Reduces sliding windows by a function, in row-major order, starting from the initial value.

    Args:
        *values: n arrays of one shape, then n scalars of their dtypes, the initial values.
        program: The function, associative: maps 2 n scalars to n scalars.
        window_dimensions: Elements of the window along each axis.
        window_strides: Distance between windows.
        padding: Number of initial values before and after each axis.
        base_dilation: Distance between the elements of an array, which are separated by initial values.
        window_dilation: Distance between the elements of a window.

    Returns:
        n arrays with an element for each window.

    Guarantee: row-invariant, if the program is lowered so. (Rows are windows.)

    Example:
        >>> largest, one = lambda x, y: (jnp.where(x > y, x, y),), (1,)
        >>> reduce_window(jnp.arange(4.0), jnp.float32(0), program=largest, window_dimensions=(2,), window_strides=(2,),
        ...               padding=((0, 0),), base_dilation=one, window_dilation=one)[0].tolist()
        [1.0, 3.0]
    """
    operands, initial = _halves(values)
    config = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, base_dilation, strict=True)]
    padded = isolate(*(lax.pad(x, i, config) for x, i in zip(operands, initial, strict=True)))
    note(reduce_window, FoldContract("window"), arrays=operands)
    window = Window(tuple(window_dimensions), tuple(window_strides), tuple(window_dilation))

    def step(total: Arrays, position: jax.Array | int) -> Arrays:
        return isolate(*on_arrays(program, *total, *(window.read(x, position) for x in padded)))

    first = tuple(jnp.broadcast_to(x, window.counts(padded[0].shape)) for x in initial)
    return fold_positions(step, first, 0, window.positions) if first[0].size else first


def _halves(values: Arrays) -> tuple[Arrays, Arrays]:
    n = len(values) // 2
    return values[:n], values[n:]
