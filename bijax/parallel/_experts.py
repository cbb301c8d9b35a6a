"""Experts that are cut over devices: tokens travel to the devices of their experts, and the results travel back.

No sum is cut. The rows of an expert are in the order of all tokens, and a token's results are added by its own device,
by rank in its top k, as on one device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bijax.core.checks import describe, flag, float_array, integer, integer_array
from bijax.ops.moe._experts import sort_by_expert
from bijax.ops.moe.gather import moe_gather
from bijax.parallel._axes import Axis, size_of, vary_over
from bijax.parallel._expert_results import sent_back
from bijax.parallel._expert_rows import Arrived, Dispatch, Sorted, before, moved
from bijax.parallel._transfers import Exchange, Transfer

_DISPATCH, _COMBINE = "bijax.parallel.moe_dispatch", "bijax.parallel.moe_combine"


class Dispatched(NamedTuple):
    """Rows of this device's experts, and the way back; the result of `moe_dispatch`.

    Attributes:
        rows: (A, C), sorted by expert, then by token over all devices; unused rows at the end are zeros or undefined.
        counts: (E / D,) int32, rows of each of this device's experts.
        order: (A,) int32, for each row where it came from, as device * (A / D) + place; -1 for unused rows.
        arrival: (A,) int32, for each place which row it became; -1 for unused places.
        offset: (A,) int32, for each row that this device sent token * topk + rank of its expert; -1 for unused places.
    """

    rows: jax.Array
    counts: jax.Array
    order: jax.Array
    arrival: jax.Array
    offset: jax.Array


def moe_dispatch(
    hidden_states: Any, selected_experts: Any, axis: Axis, *, num_experts: int, zero_unused: bool = True
) -> Dispatched:
    """Copies each token to the rows of its experts (expert parallelism), from an all-gather of the tokens.

    Device d has the experts [d * E / D, (d + 1) * E / D). The rows of an expert come in the order of the tokens of all
    devices, as from `bijax.moe_scatter` on one device, so `bijax.group_matmul` and the gradients of the experts'
    weights have its bits. There is room for every routing: no token is dropped.

    Args:
        hidden_states: (T / D, C) float32, bfloat16 or float16, this device's tokens.
        selected_experts: (T / D, topk) integers in [0, E); tokens are not sent to others.
        axis: Name of the mesh axis that experts and tokens are cut over, or a tuple of names; None for one device.
        num_experts: Number E of experts on all devices together.
        zero_unused: Whether unused rows are zeros. Otherwise a GPU may leave them unwritten, see `bijax.group_matmul`.

    Returns:
        A `Dispatched` with A = D * T / D * topk rows.

    Raises:
        TypeError: If a dtype or the axis is invalid, or `num_experts` is not an integer.
        ValueError: If the shapes do not fit, the axis is unknown, or its devices do not divide the experts.

    Guarantee: row-invariant: rows are copied. The gradient of `hidden_states` adds a token's rows by rank in its top k,
    whatever devices they were on. Any number of devices has the bits of one.

    A token travels once to each device, not once for each of its experts.

    Source: expert parallelism as in D. Lepikhin et al., "GShard" (https://arxiv.org/abs/2006.16668), without its
    capacity, and with an all-gather instead of an all-to-all on the way there.

    Example:
        >>> x, experts = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[1, 0], [0, 2], [1, 0]])
        >>> sent = moe_dispatch(x, experts, None, num_experts=3)
        >>> sent.rows[:, 0].tolist(), sent.counts.tolist()
        ([1.0, 2.0, 3.0, 1.0, 3.0, 2.0], [3, 2, 1])
    """
    options: dict[str, Any] = {"num_experts": num_experts, "zero_unused": zero_unused}
    transfer, offset = moe_dispatch_start(hidden_states, selected_experts, axis, **options)
    return moe_dispatch_done(transfer.start(), offset)


def moe_dispatch_start(
    hidden_states: Any, selected_experts: Any, axis: Axis, *, num_experts: int, zero_unused: bool = True
) -> tuple[Transfer, jax.Array]:
    """Prepares what `moe_dispatch` sends, so that a program can compute other things while it travels.

    Args:
        hidden_states: As for `moe_dispatch`.
        selected_experts: The same.
        axis: The same.
        num_experts: The same.
        zero_unused: The same.

    Returns:
        The tokens to send, and the `offset` of `Dispatched`; what arrives and this go to `moe_dispatch_done`.

    Raises:
        TypeError: As `moe_dispatch`.
        ValueError: The same.

    Guarantee: as `moe_dispatch`, which is this and `moe_dispatch_done`.

    Example:
        >>> x, experts = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[1, 0], [0, 2], [1, 0]])
        >>> transfer, offset = moe_dispatch_start(x, experts, None, num_experts=3)
        >>> moe_dispatch_done(transfer.start(), offset).counts.tolist()
        [3, 2, 1]
    """
    x = float_array(_DISPATCH, "hidden_states", hidden_states)
    selected = integer_array(_DISPATCH, "selected_experts", selected_experts, on_host=False)
    if x.ndim != 2 or selected.ndim != 2 or selected.shape[0] != x.shape[0]:
        raise ValueError(
            f"{_DISPATCH}: hidden_states must be (tokens, features) and selected_experts (tokens, topk), got"
            f" {describe(x)} and {describe(selected)}."
        )
    experts, devices = integer(_DISPATCH, "num_experts", num_experts), size_of(_DISPATCH, axis)
    if experts < 1 or experts % devices:
        raise ValueError(
            f"{_DISPATCH}: the {devices} devices of axis {axis!r} must divide num_experts, got {num_experts}; add"
            " experts that no token selects."
        )
    own, places = experts // devices, selected.size
    x, selected = vary_over(axis, x), vary_over(axis, jnp.asarray(selected))
    sorted_rows = sort_by_expert(_DISPATCH, selected, 0, experts, places)
    to_device = sorted_rows.count.reshape(devices, own).sum(axis=1)
    place = jnp.arange(places, dtype=jnp.int32)[None]
    offset = jnp.take(sorted_rows.offset, before(to_device)[:, None] + place, mode="clip")
    offset = jnp.where(place < to_device[:, None], offset, -1).reshape(-1)
    dispatch = Dispatch(axis, selected.shape[1], flag(_DISPATCH, "zero_unused", zero_unused))
    return Transfer(Sorted(x, sorted_rows.offset, sorted_rows.count, offset), dispatch), offset


def moe_dispatch_done(arrived: Arrived, offset: jax.Array) -> Dispatched:
    """Joins the rows that arrived and the way back.

    Args:
        arrived: What the transfer of `moe_dispatch_start` returns when it is started.
        offset: The array that came with it.

    Returns:
        The result of `moe_dispatch`.

    Guarantee: as `moe_dispatch`.
    """
    return Dispatched(*arrived, offset)


def moe_combine(
    rows: Any, dispatched: Dispatched, expert_weights: Any, axis: Axis, *, preferred_element_type: Any = None
) -> jax.Array:
    """Sends the results of experts back to the devices of their tokens, and adds them there as `bijax.moe_gather` does.

    Args:
        rows: (A, N) float32, bfloat16 or float16, the results for `dispatched.rows`.
        dispatched: The result of `moe_dispatch`.
        expert_weights: (T / D, topk) of any of these dtypes, of this device's tokens.
        axis: As for `moe_dispatch`.
        preferred_element_type: Dtype of the result; `rows.dtype` by default.

    Returns:
        (T / D, N), for this device's tokens.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If the shapes do not fit, or the axis is unknown.

    Guarantee: row-invariant; the gradients of `rows` and `expert_weights` too. Rows travel without being added, so any
    number of devices has the bits of one.

    Example:
        >>> x, experts = jnp.array([[1.0], [2.0]]), jnp.array([[1, 0], [0, 2]])
        >>> sent = moe_dispatch(x, experts, None, num_experts=3)
        >>> moe_combine(sent.rows, sent, jnp.array([[0.5, 2.0], [1.0, 1.0]]), None).tolist()
        [[2.5], [4.0]]
    """
    arrived = sent_back(_results(rows, dispatched, axis), dispatched.arrival, dispatched.order, axis)
    return moe_combine_done(arrived, dispatched, expert_weights, preferred_element_type=preferred_element_type)


def moe_combine_start(rows: Any, dispatched: Dispatched, axis: Axis) -> Transfer:
    """Prepares what `moe_combine` sends back, so that a program can compute other things while it travels.

    Args:
        rows: As for `moe_combine`.
        dispatched: The same.
        axis: The same.

    Returns:
        The rows to send. What arrives goes to `moe_combine_done`; rows of unused places are undefined.

    Raises:
        TypeError: As `moe_combine`.
        ValueError: The same.

    Guarantee: as `moe_combine`, which is this and `moe_combine_done`.
    """
    y = _results(rows, dispatched, axis)
    return Transfer(moved(y, dispatched.arrival, dispatched.order), Exchange(axis))


def moe_combine_done(
    arrived: jax.Array, dispatched: Dispatched, expert_weights: Any, *, preferred_element_type: Any = None
) -> jax.Array:
    """Adds the results of experts that arrived, by rank in the top k of their tokens.

    Args:
        arrived: What the transfer of `moe_combine_start` returns when it is started.
        dispatched: As for `moe_combine`.
        expert_weights: The same.
        preferred_element_type: The same.

    Returns:
        The result of `moe_combine`.

    Raises:
        TypeError: As `moe_combine`.
        ValueError: The same.

    Guarantee: as `moe_combine`.
    """
    return moe_gather(arrived, dispatched.offset, expert_weights, preferred_element_type=preferred_element_type)


def _results(rows: Any, dispatched: Dispatched, axis: Axis) -> jax.Array:
    """Returns the checked results of experts."""
    y = float_array(_COMBINE, "rows", rows)
    size_of(_COMBINE, axis)
    if y.ndim != 2 or y.shape[0] != dispatched.order.shape[0]:
        raise ValueError(
            f"{_COMBINE}: rows must have the {dispatched.order.shape[0]} rows of `dispatched`, got {describe(y)}."
        )
    return vary_over(axis, y)
