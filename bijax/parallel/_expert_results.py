"""The results of experts on their way back to the devices of their tokens."""

from typing import Final

import jax
from jax import lax

from bijax.core.derivative import custom_vjp
from bijax.dispatch.peers import PeerRows, may_move, on_peers
from bijax.ops.moe._pick import pick_rows
from bijax.parallel._axes import Axis, names_of
from bijax.parallel._expert_rows import moved
from bijax.parallel._transfers import Exchange

_KERNEL_BYTES: Final = 1 << 24
"""From here a kernel that reads used rows alone is faster than a copy and XLA's all-to-all of all rows."""


@custom_vjp(nondiff_argnums=(3,))
def sent_back(y: jax.Array, arrival: jax.Array, order: jax.Array, axis: Axis) -> jax.Array:
    """Returns the rows of all devices for this device's places; rows of unused places are undefined.

    Args:
        y: (A, N), the results for `Dispatched.rows`, which vary over the axis.
        arrival: That of `Dispatched`.
        order: The same.
        axis: As for `moe_combine`.
    """
    names = names_of(axis)
    devices = lax.axis_size(names) if names else 1
    if devices == 1 or y.size * y.dtype.itemsize < _KERNEL_BYTES or not may_move(y, names):
        return _exchanged(y, arrival, order, axis)
    kernel = PeerRows(names[0], devices, _exchanged)

    def by_kernel(*arrays: jax.Array) -> jax.Array:
        return on_peers(kernel, *arrays)

    def exchanged(y: jax.Array, arrival: jax.Array, order: jax.Array) -> jax.Array:
        return _exchanged(y, arrival, order, axis)

    found: jax.Array = lax.platform_dependent(y, arrival, order, cuda=by_kernel, default=exchanged)
    return found


def _exchanged(y: jax.Array, arrival: jax.Array, order: jax.Array, axis: Axis) -> jax.Array:
    """Moves the rows to where they leave, and then all of them by an all-to-all."""
    rows: jax.Array = Exchange(axis)(moved(y, arrival, order))
    return rows


def _forward(y: jax.Array, arrival: jax.Array, order: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
    return sent_back(y, arrival, order, axis), order


def _backward(axis: Axis, order: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return pick_rows(Exchange(axis)(g), order), None, None


sent_back.defvjp(_forward, _backward)
