"""The rows of experts in parts: the results of one part travel back while the next is computed."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bijax.core.checks import describe, float_array, integer
from bijax.ops.moe._pick import pick_rows
from bijax.parallel._axes import Axis, size_of, vary_over
from bijax.parallel._expert_rows import inverse, moved
from bijax.parallel._experts import Dispatched
from bijax.parallel._transfers import Exchange, Transfer

_OP = "bijax.parallel.split_dispatched"


class DispatchedPart(NamedTuple):
    """Some of the rows of a `Dispatched`: those that each device sent from some of its places.

    A device sends its rows sorted by expert, so the first part has the lower experts' rows of each device and the last
    the higher ones'.

    Attributes:
        rows: (R,) int32, the rows of `Dispatched.rows`, in their order; -1 at the end for unused ones.
        counts: (E / D,) int32, rows of each of this device's experts.
        arrival: (R,) int32, for each place of this part which of its rows came from there; -1 for unused places.
        order: (R,) int32, the other way round; -1 for unused rows.
    """

    rows: jax.Array
    counts: jax.Array
    arrival: jax.Array
    order: jax.Array

    def take(self, x: Any) -> jax.Array:
        """Returns the rows (R, N) of this part of an array (A, N); unused ones are zeros.

        Raises:
            TypeError: If the dtype is not a floating-point one.
        """
        return pick_rows(float_array(_OP, "x", x), self.rows)

    def combine_start(self, rows: Any, axis: Axis) -> Transfer:
        """Prepares sending back the results of this part, as `moe_combine_start` does for all.

        Args:
            rows: (R, N), the results for `take(dispatched.rows)`.
            axis: As for `moe_dispatch`.

        Raises:
            TypeError: If the dtype or the axis is invalid.
            ValueError: If the shape does not fit, or the axis is unknown.
        """
        y = float_array(_OP, "rows", rows)
        size_of(_OP, axis)
        if y.ndim != 2 or y.shape[0] != self.rows.shape[0]:
            raise ValueError(f"{_OP}: rows must have the {self.rows.shape[0]} rows of the part, got {describe(y)}.")
        return Transfer(moved(vary_over(axis, y), self.arrival, self.order), Exchange(axis))


def split_dispatched(dispatched: Dispatched, axis: Axis, *, parts: int = 2) -> tuple[DispatchedPart, ...]:
    """Splits the rows of this device's experts, so that the results of one part travel while the next is computed.

        parts = split_dispatched(sent, axis)
        moves = [p.combine_start(bijax.group_matmul(p.take(inner), down, p.counts), axis) for p in parts]
        y = moe_combine_done(join_parts([m.start() for m in moves], axis), sent, weights)

    Args:
        dispatched: The result of `moe_dispatch`.
        axis: The same axis.
        parts: Number of parts; there are fewer where a device sends fewer rows to each other one.

    Returns:
        The parts. Together they send as many bytes as `moe_combine`.

    Raises:
        TypeError: If `parts` is not an integer, or the axis is invalid.
        ValueError: If there is not at least one part, or the axis is unknown.

    Guarantee: rows are copied; the results have the bits of `moe_combine`, for products are row-invariant. Gradients of
    the experts' weights are sums over all rows, which parts add in another order: differentiate `moe_combine` instead.

    Source: combining during the down projection is the single batch overlap of SGLang
    (https://github.com/sgl-project/sglang), there by signals between streams.

    Example:
        >>> from bijax.parallel import moe_dispatch
        >>> x, experts = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[1, 0], [0, 2], [1, 0]])
        >>> sent = moe_dispatch(x, experts, None, num_experts=3)
        >>> [(part.take(sent.rows)[:, 0].tolist(), part.counts.tolist()) for part in split_dispatched(sent, None)]
        [([1.0, 2.0, 3.0], [3, 0, 0]), ([1.0, 3.0, 2.0], [0, 2, 1])]
    """
    parts, devices = integer(_OP, "parts", parts), size_of(_OP, axis)
    if parts < 1:
        raise ValueError(f"{_OP}: parts must be at least 1, got {parts}.")
    places = dispatched.order.shape[0] // devices
    parts = min(parts, max(1, places))
    edges = [places * part // parts for part in range(parts + 1)]
    from_place = dispatched.order % max(1, places)
    ends = jnp.cumsum(dispatched.counts)
    arrival = dispatched.arrival.reshape(devices, places)
    found = []
    for first, last in itertools.pairwise(edges):
        inside = (dispatched.order >= 0) & (from_place >= first) & (from_place < last)
        before = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(inside, dtype=jnp.int32))
        rows = arrival[:, first:last].reshape(-1)
        own = jnp.where(rows < 0, -1, jnp.take(before, rows, mode="clip"))
        order = inverse(own)
        counts = jnp.take(before, ends) - jnp.take(before, ends - dispatched.counts)
        found.append(DispatchedPart(jnp.where(order < 0, -1, jnp.take(rows, order, mode="clip")), counts, own, order))
    return tuple(found)


def join_parts(arrived: list[jax.Array], axis: Axis) -> jax.Array:
    """Returns the results of experts as `moe_combine_start` sends them, from those of all parts.

    Args:
        arrived: What the transfers of `DispatchedPart.combine_start` return, in the order of the parts.
        axis: As for `moe_dispatch`.

    Raises:
        TypeError: If the axis is invalid.
        ValueError: If there is none, or the axis is unknown.

    Guarantee: rows are copied.
    """
    if not arrived:
        raise ValueError("bijax.parallel.join_parts: arrived must have the results of at least one part, got none.")
    devices = size_of("bijax.parallel.join_parts", axis)
    blocks = [x.reshape(devices, x.shape[0] // devices, x.shape[1]) for x in arrived]
    joined = jnp.concatenate(blocks, axis=1)
    return joined.reshape(joined.shape[0] * joined.shape[1], joined.shape[2])
