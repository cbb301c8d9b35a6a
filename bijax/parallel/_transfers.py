"""Arrays between devices: a collective operation that is started at one place of a program and used at another."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from bijax.parallel._axes import Axis, names_of
from bijax.parallel._rows import all_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transfer:
    """Arrays that are ready to be sent, and the collective operation that sends them.

    An operation that starts a collective returns one, so that `run_overlapped` can place the collective after what is
    computed before it and at the same time as what is computed after it.

    Args:
        arrays: A pytree of arrays.
        move: Maps it to what arrives: a hashable function, part of the structure of this pytree.

    Example:
        >>> import jax.numpy as jnp
        >>> Transfer(jnp.arange(2), Exchange(None)).start().tolist()
        [0, 1]
    """

    arrays: Any
    move: Callable[[Any], Any] = dataclasses.field(metadata={"static": True})

    def start(self) -> Any:
        """Returns what arrives."""
        return self.move(self.arrays)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An all-to-all: block d of the first dimension of each array goes to device d.

    Args:
        axis: Name of the mesh axis, or a tuple of names; None for one device, which sends nothing.
    """

    axis: Axis

    def __call__(self, arrays: Any) -> Any:
        """Returns the blocks from all devices, in their order."""
        if self.axis is None:
            return arrays
        names = names_of(self.axis)
        return jax.tree.map(lambda x: lax.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True), arrays)


@dataclasses.dataclass(frozen=True)
class Together:
    """An all-gather of rows; see `all_rows`.

    Args:
        axis: As for `Exchange`.
        number: Rows to return.
    """

    axis: Axis
    number: int

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Returns the rows of all devices."""
        return all_rows(rows, self.axis, number=self.number)
