"""The rows of experts that are cut over devices: which token each is, and the way there and back."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.derivative import custom_vjp
from bijax.ops.moe._pick import pick_rows
from bijax.ops.moe.gather import moe_gather
from bijax.parallel._axes import Axis, names_of
from bijax.parallel._transfers import Exchange
from pallas_kernels.parts.no_row import NO_ROW, UNREAD


class Sorted(NamedTuple):
    """What a device sends: its tokens, and for whom they are.

    Attributes:
        x: (T / D, C), its tokens, each of them once: a token is a row of several experts of the device it goes to.
        token: (T / D * topk,) int32, token * topk + rank in its top k, sorted by expert; unused ones at the end.
        counts: (E,) int32, its rows for each expert.
        offset: The `offset` of `Dispatched`, which the gradient needs; it is not sent.
    """

    x: jax.Array
    token: jax.Array
    counts: jax.Array
    offset: jax.Array


class Arrived(NamedTuple):
    """The rows of this device's experts: `Dispatched` without its `offset`."""

    rows: jax.Array
    counts: jax.Array
    order: jax.Array
    arrival: jax.Array


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """An all-gather of tokens, of which a device copies those of its experts.

    With fewer devices than experts of a token, most tokens go to most devices. Gathering sends each of them once, where
    an all-to-all of rows, which has room for every routing, sends each once for each of its experts.

    Args:
        axis: Name of the mesh axis, or a tuple of names; None for one device.
        topk: Experts of a token.
        zero_unused: Whether unused rows are zeros, and not undefined.
    """

    axis: Axis
    topk: int
    zero_unused: bool = True

    def __call__(self, own: Sorted) -> Arrived:
        """Returns the rows of this device's experts."""
        return Arrived(*_dispatched(*own, self.axis, self.topk, self.zero_unused))


@custom_vjp(nondiff_argnums=(4, 5, 6))
def _dispatched(
    x: jax.Array, token: jax.Array, count: jax.Array, offset: jax.Array, axis: Axis, topk: int, zero_unused: bool
) -> tuple[jax.Array, ...]:
    del offset
    if axis is None:
        devices, device = 1, jnp.int32(0)
    else:
        names = names_of(axis)
        devices, device = lax.axis_size(names), lax.axis_index(names).astype(jnp.int32)
        x, token, count = (lax.all_gather(a, names, tiled=True) for a in (x, token, count))
    tokens, places, own = x.shape[0] // devices, token.shape[0] // devices, count.shape[0] // devices**2
    count = count.reshape(devices, devices * own)
    first = lax.dynamic_slice_in_dim(before(count, axis=1), device * own, 1, axis=1)  # of this device's, of each sender
    count = lax.dynamic_slice_in_dim(count, device * own, own, axis=1)
    arrival = _arrival(count, places)
    order = inverse(arrival)
    sender, place = order // max(1, places), order % max(1, places)
    at = sender * places + jnp.take(first[:, 0], sender, mode="clip") + place
    source = sender * tokens + jnp.take(token, at, mode="clip") // max(1, topk)
    rows = pick_rows(x, jnp.where(order < 0, NO_ROW if zero_unused else UNREAD, source))
    return rows, count.sum(axis=0, dtype=jnp.int32), order, arrival


def _dispatched_forward(
    x: jax.Array, token: jax.Array, count: jax.Array, offset: jax.Array, axis: Axis, topk: int, zero_unused: bool
) -> tuple[Any, Any]:
    del zero_unused
    found = _dispatched(x, token, count, offset, axis, topk, True)
    return found, (found[3], offset, jnp.zeros((x.shape[0], 0), x.dtype))


def _dispatched_backward(axis: Axis, topk: int, zero_unused: bool, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    del zero_unused
    arrival, offset, like = saved
    back = Exchange(axis)(pick_rows(cotangents[0], arrival))
    ones = jnp.ones((like.shape[0], topk), back.dtype)
    return moe_gather(back, offset, ones, preferred_element_type=like.dtype), None, None, None


_dispatched.defvjp(_dispatched_forward, _dispatched_backward)


@custom_vjp()
def moved(x: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Returns the rows of x (A, C) at `source` (A,), undefined ones at -1; `destination` is its inverse."""
    del destination
    return pick_rows(x, jnp.where(source < 0, UNREAD, source))


def _moved_forward(x: jax.Array, source: jax.Array, destination: jax.Array) -> tuple[jax.Array, jax.Array]:
    return moved(x, source, destination), destination


def _moved_backward(destination: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return pick_rows(g, destination), None, None


moved.defvjp(_moved_forward, _moved_backward)


def before(counts: jax.Array, axis: int = 0) -> jax.Array:
    """Returns for each count the sum of those before it."""
    return (jnp.cumsum(counts, axis=axis) - counts).astype(jnp.int32)


def _arrival(count: jax.Array, places: int) -> jax.Array:
    """Returns the row (D * places,) of each place: by expert, then by device and place; -1 for unused places.

    Args:
        count: (D, E / D) rows that each device sends to each expert, in this order.
        places: Places of each device.
    """
    ends = jnp.cumsum(count, axis=1)
    place = jnp.arange(places, dtype=jnp.int32)
    expert = (place[None, :, None] >= ends[:, None, :]).sum(axis=2)  # the number of experts for unused places
    row = before(count.sum(axis=0))[None] + before(count)  # first row of a device and an expert
    start = row - (ends - count)
    found = jnp.take_along_axis(start, jnp.minimum(expert, count.shape[1] - 1), axis=1) + place[None]
    return jnp.where(expert < count.shape[1], found, -1).reshape(-1).astype(jnp.int32)


def inverse(arrival: jax.Array) -> jax.Array:
    """Returns for each row its place, -1 for unused rows."""
    size = arrival.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    at = jnp.where(arrival < 0, size + place, arrival)
    return jnp.full(size, -1, jnp.int32).at[at].set(place, mode="drop", unique_indices=True)
