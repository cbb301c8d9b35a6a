"""Scatters that add one number to each row of zeros, as the gradient of `jnp.take_along_axis` may do."""

import math
from typing import Any

from jax import lax

Equation = Any


def writes_one(eqn: Equation, start: float | None) -> bool:
    """Returns whether an equation adds one number to each row of zeros, at an index of the row's own.

    Args:
        eqn: The equation.
        start: The number that its first operand repeats, None if it does not.
    """
    if eqn.primitive.name != "scatter-add" or start != 0 or math.copysign(1, start) < 0:
        return False
    (out,), (_, indices, updates) = eqn.outvars, eqn.invars
    rank = len(out.aval.shape) - 1
    rows, every = out.aval.shape[:rank], tuple(range(rank))
    numbers = eqn.params["dimension_numbers"]
    return bool(
        rank > 0
        and out.aval.dtype.name == updates.aval.dtype.name == "float32"
        and updates.aval.shape == (*rows, 1)
        and indices.aval.shape == (*rows, 1, 1)
        and numbers.update_window_dims == ()
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (rank,)
        and numbers.operand_batching_dims == numbers.scatter_indices_batching_dims == every
        and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    )


def reads_one(eqn: Equation, array: Any) -> bool:
    """Returns whether an equation takes single elements from an array."""
    return bool(eqn.primitive.name == "gather" and eqn.invars[0] is array and math.prod(eqn.params["slice_sizes"]) == 1)
