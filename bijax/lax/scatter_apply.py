"""The scatter that applies a function to elements, `x.at[i].apply(f)`.

XLA runs the function inside its scatter, one element at a time, in code that its emitters generate separately. Here
the elements are gathered, the function is applied to them as part of the surrounding program, and the results are
written back.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.scalar_program import ScalarProgram, on_arrays
from bijax.lax.scatter_windows import gather_windows
from pallas_kernels.parts.xla.tiles import isolate

_Numbers = lax.ScatterDimensionNumbers


def scatter_apply(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    program: ScalarProgram,
    dimension_numbers: _Numbers,
    mode: Any,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Applies a function to the elements of windows of an array, once for each window that holds an element.

    Args:
        operand: Array of any shape and dtype.
        indices: Integers; the last axis holds the start of one window.
        updates: An array of the windows' shape; its values are not used.
        program: The function, of an element and an unused argument, with one result.
        dimension_numbers: As in `jax.lax.scatter_apply`.
        mode: As in `jax.lax.scatter_apply`. A window out of bounds is dropped, or moved inside by "clip".
        unique_indices: A promise that no windows overlap; then the function is applied once.
        indices_are_sorted: Passed on to XLA's own scatter.

    Returns:
        An array of the shape and dtype of `operand`.

    Guarantee: row-invariant, if the program is lowered so. (A row is an element.)

    Example:
        >>> numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        >>> scatter_apply(jnp.ones(3), jnp.array([[2], [0], [2]]), jnp.zeros(3), program=lambda x, _: (3 * x,),
        ...               dimension_numbers=numbers, mode=lax.GatherScatterMode.FILL_OR_DROP).tolist()
        [3.0, 1.0, 9.0]
    """
    mode = lax.GatherScatterMode.from_any(mode)
    # XLA would count constant indices at compile time, which is slow.
    operand, indices = isolate(operand, indices)

    def gather(x: jax.Array) -> jax.Array:
        return gather_windows(x, indices, updates.shape, dimension_numbers)

    def write(windows: jax.Array) -> jax.Array:
        # Overlapping windows now hold the same elements, so the order does not matter.
        return lax.scatter(
            operand,
            indices,
            windows,
            dimension_numbers,
            mode=mode,
            unique_indices=unique_indices,
            indices_are_sorted=indices_are_sorted,
        )

    def once(x: jax.Array) -> jax.Array:
        return on_arrays(program, x, jnp.zeros_like(x))[0]

    if unique_indices and mode != lax.GatherScatterMode.CLIP:  # clipped windows may overlap
        return write(*isolate(once(gather(operand))))
    ones = jnp.ones(updates.shape, jnp.int32)
    times = lax.scatter_add(jnp.zeros(operand.shape, jnp.int32), indices, ones, dimension_numbers, mode=mode)
    if operand.size <= updates.size:
        return _repeat(once, operand, times)
    return write(_repeat(once, gather(operand), gather(times)))


def _repeat(once: Any, x: jax.Array, times: jax.Array) -> jax.Array:
    """Applies a function to each element `times` times."""
    longest = times.max(initial=0)

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, x = state
        return i + jnp.int32(1), isolate(lax.select(times > i, once(x), x))[0]

    return lax.while_loop(lambda state: state[0] < longest, step, (jnp.int32(0), isolate(x)[0]))[1]
