"""The layout of expert rows by XLA's sorts, searches and scatters, and their sums, on any platform."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.parts.no_row import BEFORE_ALL, NO_ROW, WRONG
from pallas_kernels.parts.xla.lanes import run_flat
from pallas_kernels.parts.xla.last_and_first import last_and_first_rows

Arrays = tuple[jax.Array, ...]


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
    found = last_and_first_rows(offset, places=places)
    last, first = found[:places, 0], -found[:places, 1]
    row = jnp.where(last == BEFORE_ALL, NO_ROW, last)
    return jnp.where(((last != first) & (row != NO_ROW)) | (found[places, 0] != BEFORE_ALL), WRONG, row)


def add_expert_rows(
    rows: jax.Array,
    offset: jax.Array,
    row: jax.Array,
    weights: jax.Array,
    *,
    dtype: str,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> jax.Array:
    """Adds each token's rows in float32, by rank in its top k, each times its weight.

    Args:
        rows: (R, C), at least one row.
        offset: (R,) int32, the place of each row, negative for unused rows.
        row: (T, topk) int32, `rows_of_tokens(offset, places=T * topk)`; topk at least 1.
        weights: (T, topk).
        dtype: Dtype of the result.
        functions: How element-wise code is computed.

    Returns:
        (T, C), rounded once; +0 rather than -0. A missing row counts as zero; a token with a place of several rows is
        nan, and so are all tokens if an offset is out of range.

    Guarantee: row-invariant, a row being a token.

    Example:
        >>> offset = jnp.array([1, 2, 0])
        >>> row = rows_of_tokens(offset, places=4).reshape(2, 2)
        >>> rows, weights = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[0.5, 2.0], [1.0, 1.0]])
        >>> add_expert_rows(rows, offset, row, weights, dtype="float32").tolist()
        [[3.5], [2.0]]
    """
    honour("add_expert_rows", functions, XLA_FUNCTIONS)
    del offset
    return _added(run_flat, rows, row, weights, dtype)


def add_expert_rows_on_gpu(
    rows: jax.Array,
    offset: jax.Array,
    row: jax.Array,
    weights: jax.Array,
    *,
    dtype: str,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> jax.Array:
    """Does what `add_expert_rows` does: fences in the lowering preserve the bits in any fusion."""
    honour("add_expert_rows", functions, XLA_FUNCTIONS)
    del offset
    return _added(lambda program, *arrays: program(*arrays), rows, row, weights, dtype)


def weighted(x: jax.Array, weight: jax.Array, used: jax.Array) -> jax.Array:
    """Returns rows times their weights in float32; zeros where a row is not used."""
    return jnp.where(used, x.astype(jnp.float32) * weight.astype(jnp.float32), jnp.float32(0))


def total(*terms: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum of float32 terms in their order, rounded once; +0 rather than -0."""
    added = functools.reduce(lambda a, b: a + b, terms)
    # The sign of a zero would tell which experts are on other ranks.
    return jnp.where(added == 0, jnp.float32(0), added).astype(dtype)


def _added(run: Callable[..., Arrays], rows: jax.Array, row: jax.Array, weights: jax.Array, dtype: str) -> jax.Array:
    picked = jnp.take(rows, row, axis=0, mode="clip")
    wide = [jnp.broadcast_to(a[..., None], picked.shape) for a in (weights, row >= 0)]
    # Products and sums are two steps, or a compiler could contract them.
    (parts,) = run(lambda *arrays: (weighted(*arrays),), picked, *wide)
    (y,) = run(lambda *terms: (total(*terms, dtype=dtype),), *(parts[:, i] for i in range(row.shape[1])))
    wrong: Any = jnp.any(row == WRONG, axis=1, keepdims=True)
    return jnp.where(wrong, jnp.asarray(jnp.nan, y.dtype), y)


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
