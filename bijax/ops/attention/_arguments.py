"""Checks of attention's arguments: heads, lengths, positions, windows and page tables.

Invalid known values raise. Traced values cannot: a mask of the valid sequences is returned instead, and the results of
the others become nan.
"""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import FLOATS, as_array, describe, integer_array

LAST_POSITION = (1 << 30) - 1
"""Largest position of a first query, so that sums of positions fit in int32."""


def score_array(op: str, name: str, given: Any, sizes: tuple[int, int, int, int], *, single: bool) -> jax.Array | None:
    """Returns a bias or a mask with four dimensions.

    Args:
        op: Name of the operation.
        name: "bias" or "mask".
        given: The array, or None.
        sizes: (B, N, T, S).
        single: Whether the call has no dimension of sequences.

    Returns:
        (B or 1, N or 1, T or 1, S or 1), or None.

    Raises:
        TypeError: If a bias is not a float array, or a mask not a bool array.
        ValueError: If it cannot be broadcast to `sizes`.
    """
    if given is None:
        return None
    array = jnp.asarray(as_array(op, name, given, "bool" if name == "mask" else "floats"))
    if name == "mask" and array.dtype != jnp.bool_:
        raise TypeError(
            f"{op}: mask must be bool, true where a query sees a key, got {describe(array)}; floats to be added to the"
            " scores are a bias."
        )
    if name == "bias" and array.dtype.name not in FLOATS:
        raise TypeError(f"{op}: bias must be an array of {', '.join(FLOATS)}, got {describe(array)}.")
    wanted = sizes[1:] if single else sizes
    missing = len(wanted) - array.ndim
    shape = (1,) * missing + array.shape
    if missing < 0 or any(n not in (1, size) for n, size in zip(shape, wanted, strict=True)):
        names = "(N, T, S)" if single else "(B, N, T, S)"
        raise ValueError(
            f"{op}: {name} must have a shape that can be broadcast to {names} = {list(wanted)}, got {describe(array)}."
        )
    return array.reshape((1,) * (4 - len(shape)) + shape)


def check_heads(op: str, query: jax.Array, key: jax.Array, value: jax.Array, key_name: str, value_name: str) -> None:
    """Checks heads of query (B, T, N, H), key (..., K, H) and value (..., K, V).

    Raises:
        ValueError: If they do not fit.
    """
    came = f"got query {describe(query)}, {key_name} {describe(key)} and {value_name} {describe(value)}"
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{op}: {key_name} and {value_name} must have one shape, but for the width of a head (last dimension),"
            f" {came}."
        )
    (heads, size), query_heads = key.shape[-2:], query.shape[-2]
    if query.shape[-1] != size or min(size, value.shape[-1]) < 1:
        raise ValueError(
            f"{op}: the width of a head (last dimension) must be one for query and {key_name}, and at least 1, {came}."
        )
    if heads < 1 or query_heads % heads:
        raise ValueError(
            f"{op}: the number of query heads must be a multiple of the number of key heads,"
            f" got {query_heads} and {heads}: {came}."
        )


def scale_factor(op: str, scale: Any, size: int) -> float:
    """Returns the scale of the scores, 1/sqrt(H) by default.

    Raises:
        TypeError: If `scale` is not a known number.
        ValueError: If it is not finite.
    """
    if scale is None:
        return 1.0 / math.sqrt(size)
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(f"{op}: scale must be a Python number, got a traced value; multiply the query by it instead.")
    try:
        factor = float(scale)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: scale must be a number or None, got {scale!r}.") from error
    if not math.isfinite(factor):
        raise ValueError(f"{op}: scale must be finite, got {factor}.")
    return factor


def window_sizes(op: str, window: Any) -> tuple[int, int] | None:
    """Returns (before, after), how far a query sees from its own position.

    Raises:
        TypeError: If `window` is neither None, an int nor a pair of ints.
        ValueError: If a size is negative.
    """
    if window is None:
        return None
    try:
        before, after = (operator.index(w) for w in (window if isinstance(window, tuple | list) else (window, window)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{op}: local_window_size must be None, an int or a pair of ints (before, after), got {window!r}."
        ) from error
    if before < 0 or after < 0:
        raise ValueError(f"{op}: the sizes in local_window_size must not be negative, got {window!r}.")
    return before, after


def per_sequence(
    op: str, name: str, given: Any, batch: int, highest: int, meaning: str
) -> tuple[jax.Array | np.ndarray, jax.Array | None]:
    """Returns a number for each sequence.

    Args:
        op: Name of the operation.
        name: Name of the argument.
        given: An int or (B,) ints; None means `highest`.
        batch: Number B of sequences.
        highest: The largest number allowed; the smallest is 0.
        meaning: What the largest number is, for the message.

    Returns:
        (B,) int32, and None or, for a traced argument, the (B,) mask of the sequences whose number is in range.
        Numbers out of range are returned as 0.

    Raises:
        TypeError: If the numbers are not integers.
        ValueError: If the shape is wrong, or a known number is out of range.
    """
    if given is None:
        return np.full((batch,), highest, np.int32), None
    numbers = integer_array(op, name, given)
    if numbers.shape not in ((), (batch,)):
        raise ValueError(
            f"{op}: {name} must be an int or have the shape ({batch},) of the sequences, got {describe(numbers)}."
        )
    if isinstance(numbers, jax.core.Tracer):
        numbers = jnp.broadcast_to(numbers, (batch,))
        valid = (numbers >= 0) & (numbers <= highest)
        return jnp.where(valid, numbers, 0).astype(jnp.int32), valid
    numbers = np.broadcast_to(numbers, (batch,))
    wrong = np.flatnonzero((numbers < 0) | (numbers > highest))
    if wrong.size:
        raise ValueError(
            f"{op}: {name} must be in [0, {highest}] ({meaning}), got {numbers[wrong[0]]} for sequence {wrong[0]}."
        )
    return numbers.astype(np.int32), None


class Numbers(NamedTuple):
    """Numbers of sequences, (B,) int32 each.

    Attributes:
        offsets: Position of the first query.
        queries: Number of queries.
        keys: Number of keys.
    """

    offsets: jax.Array | np.ndarray
    queries: jax.Array | np.ndarray
    keys: jax.Array | np.ndarray


def paged_numbers(
    op: str,
    what: str,
    lengths: Any,
    query_seq_lengths: Any,
    query_offset: Any,
    batch: int,
    queries: int,
    capacity: int,
) -> tuple[Numbers, jax.Array | None]:
    """Returns the numbers of sequences in pages, and which are in range, as `per_sequence` does.

    Args:
        op: Name of the operation.
        what: What pages hold, for messages.
        lengths: An int or (B,) ints, keys of each sequence.
        query_seq_lengths: (B,) ints, queries of each sequence; all by default.
        query_offset: An int or (B,) ints; lengths - query_seq_lengths by default.
        batch: Number B of sequences.
        queries: Largest number of queries.
        capacity: Largest number of keys.

    Raises:
        TypeError: If the numbers are not integers, or `lengths` is None: pages hold more than a sequence's keys.
        ValueError: If a shape is wrong, or a known number is out of range.
    """
    if lengths is None:
        raise TypeError(f"{op}: lengths must hold the number of {what} of each sequence, got None.")
    key_lengths, valid = per_sequence(op, "lengths", lengths, batch, capacity, f"the {what} that the page table holds")
    query_lengths, valid_queries = per_sequence(
        op, "query_seq_lengths", query_seq_lengths, batch, queries, "the queries given, T"
    )
    meaning = "the last position supported"
    if query_offset is None:
        query_offset = key_lengths - query_lengths
        meaning = f"lengths - query_seq_lengths by default: lengths counts the {what} of the queries too"
    offsets, valid_offsets = per_sequence(op, "query_offset", query_offset, batch, LAST_POSITION, meaning)
    return Numbers(offsets, query_lengths, key_lengths), both(both(valid, valid_queries), valid_offsets)


def table_of(op: str, page_table: Any, batch: int) -> jax.Array | np.ndarray:
    """Returns a page table (B, n) of integers.

    Args:
        op: Name of the operation.
        page_table: The argument.
        batch: Number B of sequences.

    Raises:
        TypeError: If it does not hold integers.
        ValueError: If it has another shape.
    """
    table: jax.Array | np.ndarray = integer_array(op, "page_table", page_table, on_host=False)
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"{op}: page_table must have the shape ({batch}, pages of a sequence), got {describe(table)}.")
    return table


def limits_of(
    offsets: jax.Array | np.ndarray, queries: jax.Array | np.ndarray, keys: jax.Array | np.ndarray
) -> jax.Array | np.ndarray:
    """Returns the numbers of sequences as one array, so that a GPU needs no kernel to fill those that are known.

    Args:
        offsets: (B,) int32, position of the first query.
        queries: (B,) int32.
        keys: (B,) int32.

    Returns:
        (B, 3) int32, of NumPy if all of them are.
    """
    numbers = (offsets, queries, keys)
    if all(isinstance(x, np.ndarray) for x in numbers):
        return np.stack(numbers, axis=1)
    return jnp.stack(numbers, axis=1)


def check_pages(
    op: str, page_table: jax.Array | np.ndarray, lengths: jax.Array | np.ndarray, page: int, pages: int
) -> None:
    """Checks the entries of a page table that hold keys of a sequence, unless the table or the lengths are traced.

    Args:
        op: Name of the operation.
        page_table: (B, n) integers.
        lengths: (B,) int32 numbers of keys.
        page: Keys of a page.
        pages: Pages of the cache.

    Raises:
        ValueError: If a known entry points outside the cache.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (page_table, lengths)):
        return
    table, length = np.asarray(page_table), np.asarray(lengths)
    used = np.arange(table.shape[1], dtype=np.int32)[None] * page < length[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        sequence, entry = np.argwhere(wrong)[0]
        raise ValueError(
            f"{op}: page_table must hold pages in [0, {pages}) (the cache has {pages} of {page} keys) wherever a"
            f" sequence has keys, got {table[sequence, entry]} for sequence {sequence}, entry {entry}, with"
            f" {length[sequence]} keys."
        )


def narrowed_table(page_table: jax.Array | np.ndarray) -> jax.Array:
    """Returns a page table as int32; what does not fit stays outside any cache."""
    limits, given = (np.iinfo(x) for x in (np.int32, page_table.dtype))
    if given.min < limits.min or given.max > limits.max:
        xp = np if isinstance(page_table, np.ndarray) else jnp
        page_table = xp.clip(page_table, max(given.min, -1), limits.max)
    return jnp.asarray(page_table).astype(jnp.int32)


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Returns the conjunction of two masks; None means all valid."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
