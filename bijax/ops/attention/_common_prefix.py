"""Checks of the keys that all sequences begin with, in the same pages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe, integer_array
from bijax.ops.attention._arguments import both


def check_common_prefix(
    op: str,
    given: Any,
    page_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    page: int,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Checks the number of keys that all sequences begin with.

    Args:
        op: Name of the operation.
        given: The argument common_prefix_length.
        page_table: (B, n) integers.
        lengths: (B,) int32 numbers of keys.
        page: Keys of a page.

    Returns:
        (1,) int32, or None if not passed; and None or, for traced values, a mask, (B,) or scalar, of the sequences
        whose prefix pages equal the first sequence's.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it has dimensions or is out of range, or a sequence's prefix pages differ.
    """
    if given is None:
        return None, None
    capacity = page * page_table.shape[1]
    number = integer_array(op, "common_prefix_length", given)
    traced = isinstance(number, jax.core.Tracer)
    if number.shape:
        raise ValueError(f"{op}: common_prefix_length must be one integer for all sequences, got {describe(number)}.")
    inside = (number >= 0) & (number <= capacity)
    if not traced and not inside:
        raise ValueError(
            f"{op}: common_prefix_length must be in [0, {capacity}] (the keys that the page table holds), got {number}."
        )
    known = not any(isinstance(x, jax.core.Tracer) for x in (number, page_table, lengths))
    xp = np if known else jnp
    common = xp.where(inside, number, 0).astype(xp.int32)
    table, length = xp.asarray(page_table), xp.asarray(lengths)
    ends = page * xp.arange(1, table.shape[1] + 1, dtype=xp.int32)
    wrong = (table != table[:1]) & (ends <= xp.minimum(length, common)[:, None])
    if not known:
        valid = ~jnp.any(wrong, axis=1)
        return jnp.reshape(common, 1), both(valid, inside[None]) if traced else valid
    if wrong.any():
        sequence, entry = np.argwhere(wrong)[0]
        raise ValueError(
            f"{op}: with common_prefix_length={number}, every sequence must have the pages of sequence 0 up to there,"
            f" got page {table[sequence, entry]} for sequence {sequence}, entry {entry} (pages of {page} keys), where"
            f" sequence 0 has {table[0, entry]}."
        )
    return jnp.asarray(common[None]), None
