"""Scatters that combine, with the operands and parameters of JAX's own primitives."""

from typing import Unpack

import jax
from jax import lax

from bijax.core.primitive import define_kernel
from bijax.dispatch.kernels import backend_of
from bijax.lax.scatter_windows import Parameters, apart, as_windows, window_starts
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.lanes import Combine
from pallas_kernels.parts.xla.tiles import isolate


def scatter_add(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, **parameters: Unpack[Parameters]
) -> jax.Array:
    """Adds windows of updates to an array, in float32 (float64 for float64), in the order of their indices.

    Args:
        operand: Array of any shape, float32, bfloat16, float16 or float64: where each sum starts.
        indices: Integers; the last axis holds the start of one window.
        updates: Windows of the dtype of `operand`.
        **parameters: Those of the primitive. With unique indices there is no order to keep.

    Returns:
        An array of the shape and dtype of `operand`, each element rounded once.

    Raises:
        UnsupportedError: If the dtype is not one of the four.

    Guarantee: an element depends only on its start, on the updates at its position and on their order. Continuing to
    add to a previous float32 result gives the bits of adding all updates at once, wherever they are split.

    Example:
        >>> import jax.numpy as jnp
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter_add(jnp.zeros(3), jnp.array([[2], [0], [2]]), jnp.array([1.0, 2.0, 4.0]),
        ...             dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [2.0, 0.0, 5.0]
    """
    return _scatter("scatter_add", lax.add, operand, indices, updates, parameters)


def scatter_sub(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, **parameters: Unpack[Parameters]
) -> jax.Array:
    """Subtracts windows of updates from an array, see `scatter_add`.

    Guarantee: an element depends only on its start, on the updates at its position and on their order.

    Example:
        >>> import jax.numpy as jnp
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter_sub(jnp.zeros(2), jnp.array([[1]]), jnp.ones(1),
        ...             dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [0.0, -1.0]
    """
    return _scatter("scatter_sub", lax.sub, operand, indices, updates, parameters)


def scatter_mul(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, **parameters: Unpack[Parameters]
) -> jax.Array:
    """Multiplies an array by windows of updates, see `scatter_add`.

    Guarantee: an element depends only on its start, on the updates at its position and on their order.

    Example:
        >>> import jax.numpy as jnp
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter_mul(jnp.ones(2), jnp.array([[1], [1]]), jnp.full(2, 3.0),
        ...             dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [1.0, 9.0]
    """
    return _scatter("scatter_mul", lax.mul, operand, indices, updates, parameters)


def _scatter(
    op: str,
    combine: Combine,
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    parameters: Parameters,
) -> jax.Array:
    dtype, numbers = accumulator(op, operand.dtype), parameters["dimension_numbers"]
    mode = lax.GatherScatterMode.from_any(parameters["mode"])
    unique_indices = parameters.get("unique_indices", False)
    if apart(indices, numbers) or (unique_indices and mode != lax.GatherScatterMode.CLIP):  # clipped ones may overlap
        x, updates = isolate(operand.astype(dtype), updates.astype(dtype))
        stock = getattr(lax, op)
        result = isolate(stock(x, indices, updates, numbers, unique_indices=True, mode=mode))[0]
        return result.astype(operand.dtype)
    updates = as_windows(updates, operand.ndim, numbers)
    starts, inside = window_starts(indices, operand.shape, updates.shape[1:], numbers, mode)
    return _kernel(operand, starts, inside, updates, combine=combine)[0]


_kernel = define_kernel("scatter", backend_of("scatter"))
