"""Arrays between devices: a collective operation that is started at one place of a program and used at another."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
from jax import lax

from bijax.core.derivative import custom_vjp
from bijax.dispatch.peers import PeerExchange, may_exchange, on_peers
from bijax.parallel._axes import Axis, names_of
from bijax.parallel._rows import all_rows

_KERNEL_BYTES: Final = 1 << 24
"""From here a kernel that moves used rows alone is faster than XLA's all-to-all of all rows."""


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
class UsedExchange:
    """An all-to-all of rows of which only some are needed: the first ones from each device.

    Args:
        axis: As for `Exchange`.
    """

    axis: Axis

    def __call__(self, given: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns the rows from all devices.

        Args:
            given: (D * R, C) the rows for each device, and (D,) how many this device needs of each: the others are
                undefined.
        """
        return _used(*given, self.axis)


@custom_vjp(nondiff_argnums=(2,))
def _used(rows: jax.Array, used: jax.Array, axis: Axis) -> jax.Array:
    exchange = Exchange(axis)
    if axis is None:
        return rows
    names = names_of(axis)
    devices = lax.axis_size(names)
    blocks = rows.reshape(devices, rows.shape[0] // devices, rows.shape[1])
    if rows.size * rows.dtype.itemsize < _KERNEL_BYTES or not may_exchange(blocks, names):
        moved: jax.Array = exchange(rows)
        return moved
    kernel = PeerExchange(names[0], devices, _Blocks(axis))

    def by_kernel(rows: jax.Array, used: jax.Array) -> jax.Array:
        return on_peers(kernel, rows.reshape(blocks.shape), used).reshape(rows.shape)

    return lax.platform_dependent(rows, used, cuda=by_kernel, default=lambda rows, _: exchange(rows))


def _used_forward(rows: jax.Array, used: jax.Array, axis: Axis) -> tuple[jax.Array, None]:
    return _used(rows, used, axis), None


def _used_backward(axis: Axis, saved: None, g: jax.Array) -> tuple[jax.Array, None]:
    del saved
    return Exchange(axis)(g), None


_used.defvjp(_used_forward, _used_backward)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """An all-to-all of (D, R, C) by XLA."""

    axis: Axis

    def __call__(self, blocks: jax.Array) -> jax.Array:
        moved: jax.Array = Exchange(self.axis)(blocks)
        return moved


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
