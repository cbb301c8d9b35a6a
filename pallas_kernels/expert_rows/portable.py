"""The layout of expert rows by XLA's sorts, searches and scatters, on any platform."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.parts.no_row import NO_ROW, WRONG

Arrays = tuple[jax.Array, ...]

_BEFORE_ALL: Final = np.iinfo(np.int32).min
"""Less than the number of any row and its negative."""


def sort_by_expert(number: jax.Array, *, first: int, end: int, allocated: int, topk: int = 1) -> Arrays:
    """Assigns rows to the places of the experts in [first, end), sorted by expert and then by place.

    Args:
        number: (A,) int32, the expert of each place; experts outside [first, end) get no row.
        first: First expert.
        end: One past the last expert.
        allocated: Number of available rows.
        topk: Places of a token.

    Returns:
        offset (allocated,) int32, the place of each row, -1 for unused rows; expert (allocated,) int32, counted from
        `first`, end - first for unused rows; count (end - first,) int32, the rows that each expert needs; a bool,
        whether there are enough rows; the places (A,) int32 in row order, places without a row last; the row (A,) int32
        of each place, -1 for places without one; and the token (allocated,) int32 of each row, -1 for unused rows, -2
        for all if there are too few.

    Example:
        >>> found = sort_by_expert(jnp.array([1, 0, 2, 1]), first=1, end=3, allocated=4, topk=2)
        >>> offset, expert, count, fit, place, row, token = found
        >>> offset.tolist(), expert.tolist(), count.tolist(), bool(fit), place.tolist()
        ([0, 3, 2, -1], [0, 0, 1, 2], [2, 1], True, [0, 3, 2, 1])
        >>> row.tolist(), token.tolist()
        ([0, -1, 2, 1], [0, 1, 1, -1])
    """
    experts = end - first
    local = jnp.where((number >= first) & (number < end), number - first, experts)
    by_expert, place = _sorted_with_places(local, experts + 1)
    count = jnp.zeros((experts,), jnp.int32).at[local].add(1, mode="drop")
    offset = _resized(jnp.where(by_expert < experts, place, NO_ROW), allocated, NO_ROW)
    fit = jnp.sum(count) <= allocated
    index = jnp.arange(number.size, dtype=jnp.int32)
    own = jnp.where((by_expert < experts) & (index < allocated), index, NO_ROW)
    row = jnp.zeros_like(own).at[place].set(own, unique_indices=True)
    token = jnp.where(fit, jnp.where(offset >= 0, lax.div(offset, jnp.int32(topk)), NO_ROW), WRONG)
    return offset, _resized(by_expert, allocated, experts), count, fit, place, row, token


def spread_to_experts(x: jax.Array, number: jax.Array, *, experts: int, topk: int) -> Arrays:
    """Copies tokens to a row for each of their places, sorted by expert and then by place.

    Args:
        x: (T, C), T at least 1.
        number: (T * topk,) int32, the expert of each place; those outside [0, experts) get no row.
        experts: Number of experts.
        topk: Places of a token.

    Returns:
        The rows (T * topk, C), zeros after those of all experts; count (experts,) int32; and the row (T * topk,) int32
        of each place, -1 for places without one.

    Guarantee: row-invariant: a copy is exact.

    Example:
        >>> rows, count, row = spread_to_experts(jnp.array([[1.0], [2.0]]), jnp.array([1, 0, 0, 9]), experts=2, topk=2)
        >>> rows[:, 0].tolist(), count.tolist(), row.tolist()
        ([1.0, 2.0, 1.0, 0.0], [2, 1], [2, 0, 1, -1])
    """
    found = sort_by_expert(number, first=0, end=experts, allocated=number.size, topk=topk)
    _, _, count, _, _, row, token = found
    rows = jnp.take(x, token, axis=0, mode="clip")
    return jnp.where(token[:, None] < 0, jnp.zeros((), x.dtype), rows), count, row


def rows_by_count(count: jax.Array, *, rows: int) -> Arrays:
    """Returns the expert of each row.

    Args:
        count: (E,) int32, the rows of each expert.
        rows: Number of rows.

    Returns:
        expert (rows,) int32, E for rows past the last expert's; and a bool, whether no count is negative and there are
        enough rows. If not, no row has an expert.

    Example:
        >>> expert, fit = rows_by_count(jnp.array([1, 0, 2]), rows=4)
        >>> expert.tolist(), bool(fit)
        ([0, 2, 2, 3], True)
    """
    found = jnp.where((count >= 0) & (count <= rows), count, rows + 1)

    def add(total: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.minimum(total, rows + 1 - number) + number  # saturates at rows + 1, so it cannot overflow

    # With few experts nothing can overflow, and a cumulative sum takes fewer kernels.
    ends = lax.cumsum(found) if count.size * (rows + 1) < 1 << 31 else lax.associative_scan(add, found)
    fit = jnp.all(ends <= rows)
    ends = jnp.where(fit, ends, 0)
    row = jnp.arange(rows, dtype=jnp.int32)
    # Unrolled, so that a GPU runs all steps in one kernel.
    return jnp.searchsorted(ends, row, side="right", method="scan_unrolled").astype(jnp.int32), fit


def rows_of_tokens(offset: jax.Array, *, places: int) -> jax.Array:
    """Returns the row of each place.

    Args:
        offset: (A,) int32, the place of each row, negative for unused rows.
        places: Number of places.

    Returns:
        (places,) int32: the row; -1 for a place without a row, -2 for a place with several. If any offset is out of
        range, all are -2.

    Example:
        >>> rows_of_tokens(jnp.array([2, -1, 0, 2]), places=3).tolist()
        [2, -1, -2]
    """
    # One scatter finds the first and the last row of every place, and of a place for all offsets after the last one.
    slots = jnp.where(offset >= 0, jnp.minimum(offset, places), places + 1)
    number = jnp.arange(offset.size, dtype=jnp.int32)
    found = jnp.full((places + 1, 2), _BEFORE_ALL, jnp.int32)
    found = found.at[slots].max(jnp.stack([number, -number], 1), mode="drop")
    last, first = found[:places, 0], -found[:places, 1]
    row = jnp.where(last == _BEFORE_ALL, NO_ROW, last)
    return jnp.where(((last != first) & (row != NO_ROW)) | (found[places, 0] != _BEFORE_ALL), WRONG, row)


def _sorted_with_places(numbers: jax.Array, end: int) -> tuple[jax.Array, jax.Array]:
    """Stable sort of numbers in [0, end); returns the sorted numbers and their places."""
    place = jnp.arange(numbers.size, dtype=jnp.int32)
    if numbers.size * end >= 1 << 31:
        ascending, place = lax.sort((numbers, place), num_keys=2)
        return ascending, place
    # Packed into one number, which XLA sorts faster on a GPU, in one pass over memory.
    both = lax.sort(numbers * numbers.size + place)
    return both // max(1, numbers.size), both % max(1, numbers.size)


def _resized(x: jax.Array, length: int, fill: int) -> jax.Array:
    return jnp.pad(x[:length], (0, max(0, length - x.size)), constant_values=fill)
