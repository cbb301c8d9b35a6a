"""Scatters that add one number to each row of zeros, as in the gradient of `jnp.take_along_axis`."""

import math
from typing import Any

from jax import lax

Equation = Any


def writes_one(eqn: Equation, start: float | None) -> bool:
    """Returns whether an equation adds one number to each row of zeros, at an index per row.

    Args:
        eqn: The equation.
        start: The number that its first operand repeats, None if it does not.
    """
    if eqn.primitive.name != "scatter-add" or start != 0 or math.copysign(1, start) < 0:
        return False
    (out,), (_, indices, updates) = eqn.outvars, eqn.invars
    rank = len(out.aval.shape) - 1
    rows, numbers = out.aval.shape[:rank], eqn.params["dimension_numbers"]
    # `jnp.take_along_axis` drops dimensions of 1 from the indices, such as a batch of one sequence.
    batch = tuple(map(int, numbers.operand_batching_dims))
    rest = tuple(d for d in range(rank) if d not in batch)
    return bool(
        rank > 0
        and out.aval.dtype.name == updates.aval.dtype.name == "float32"
        and updates.aval.shape == (*rows, 1)
        and all(rows[d] == 1 for d in rest)
        and indices.aval.shape == (*(rows[d] for d in batch), 1, 1)
        and numbers.update_window_dims == rest
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (rank,)
        and batch == tuple(sorted(batch))
        and numbers.scatter_indices_batching_dims == tuple(range(len(batch)))
        and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    )


def reads_one(eqn: Equation, array: Any) -> bool:
    """Returns whether an equation takes single elements from an array."""
    return bool(eqn.primitive.name == "gather" and eqn.invars[0] is array and math.prod(eqn.params["slice_sizes"]) == 1)
