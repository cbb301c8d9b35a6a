"""Rows sorted by expert: scatters the tokens of a mixture of experts to the rows of one rank, and gathers them back."""

import functools
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe, integer, integer_array
from bijax.core.partitioning import whole_array
from bijax.core.tag import kernel_code
from bijax.dispatch.routing import rows_by_count_kernel, rows_of_tokens_kernel, sort_kernel
from bijax.ops._engine_arguments import check_known, check_shape, is_known, narrowed
from bijax.ops.elementwise.call import elementwise
from bijax.ops.moe._pick import pick_rows
from pallas_kernels.expert_rows.portable import total, weighted
from pallas_kernels.parts.no_row import NO_ROW, WRONG


@dataclass(frozen=True)
class Shared:
    """The rows of shared experts, which come first: the same tokens for each of them.

    Attributes:
        experts: Shared experts of the rank.
        first: First of the tokens that they compute here.
        tokens: Number of these tokens.
    """

    experts: int
    first: int
    tokens: int

    @property
    def rows(self) -> int:
        """All rows of shared experts."""
        return self.experts * self.tokens

    def of_expert(self, rows: jax.Array) -> jax.Array:
        """Returns the rows (R, C) of shared experts as (experts, tokens, C)."""
        return rows[: self.rows].reshape(self.experts, self.tokens, rows.shape[1])


def shared_experts(op: str, tokens: int, experts: Any, first: Any, per_rank: Any) -> Shared:
    """Checks which tokens the shared experts compute; by default all from `num_tokens_offset` on.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If the tokens are out of range.
    """
    number = integer(op, "num_shared_experts_per_rank", experts)
    start = integer(op, "num_tokens_offset", first)
    length = (tokens - start if number else 0) if per_rank is None else integer(op, "num_tokens_per_rank", per_rank)
    if number < 0 or start < 0 or length < 0 or start + length > tokens:
        raise ValueError(
            f"{op}: num_shared_experts_per_rank must be at least 0 and the tokens [num_tokens_offset, num_tokens_offset"
            f" + num_tokens_per_rank) lie in [0, {tokens}), got {number} shared experts and [{start},"
            f" {start + length})."
        )
    return Shared(number, start, length)


_CACHED_BYTES: Final = 1 << 24  # that stay in a GPU's cache while rows are written


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The token and expert of each row of a rank, excluding the rows of shared experts.

    Attributes:
        offset: (A,) int32, token * topk + rank of the expert in the token's top k; -1 for rows that are not used.
        expert: (A,) int32, counted from the first expert of the rank; the number of experts for rows not used.
        count: (experts,) int32, the rows of each expert.
        fit: Bool, whether there are enough rows for the tokens.
        place: (tokens * topk,) int32, the row index of each token's expert, experts without a row last;
            None if the tokens are not known, as the next two.
        row: (tokens * topk,) int32, the row of each token's expert; -1 for experts without a row.
        token: (A,) int32, the token of each row; -1 for rows not used, -2 for all rows if there are too few.
    """

    offset: jax.Array
    expert: jax.Array
    count: jax.Array
    fit: jax.Array
    place: jax.Array | None = None
    row: jax.Array | None = None
    token: jax.Array | None = None


def sort_by_expert(op: str, selected: Any, first: int, end: int, allocated: int) -> Rows:
    """Assigns rows to the tokens of the experts in [first, end), ordered by expert, then by token.

    Raises:
        ValueError: If known experts need more rows than there are.
    """
    if is_known(selected):
        needed = int(((selected >= first) & (selected < end)).sum())
        if needed > allocated:
            raise ValueError(
                f"{op}: allocated_tokens must be at least {needed}, the tokens that selected_experts"
                f" {describe(selected)} gives to the experts [{first}, {end}), got {allocated}."
            )
    number = numbers_within(selected, first, end)
    topk = max(1, number.shape[-1])
    return Rows(*sort_kernel(number.reshape(-1), first=first, end=end, allocated=allocated, topk=topk))


def numbers_within(selected: Any, first: int, end: int) -> jax.Array:
    """Returns experts as int32; those outside [first, end) may become others outside."""
    number = jnp.asarray(selected)
    return number if number.dtype == jnp.int32 else narrowed(number, first, end - 1)


def expert_range(op: str, first: Any, end: Any) -> tuple[int, int]:
    """Returns the experts of a rank, [first, end).

    Raises:
        TypeError: If one is not an integer.
        ValueError: If the range is invalid.
    """
    start, stop = integer(op, "expert_start_idx", first), integer(op, "expert_end_idx", end)
    if not 0 <= start <= stop < 2**31:
        raise ValueError(
            f"{op}: expert_start_idx and expert_end_idx must hold 0 <= expert_start_idx <= expert_end_idx < 2**31, got"
            f" {start} and {stop}."
        )
    return start, stop


def checked_counts(op: str, name: str, count: Any, experts: int | None, rows: int) -> jax.Array:
    """Returns the row count of each expert as int32; a traced count may be negative or exceed all rows.

    Args:
        op: Name of the operation.
        name: Name of the argument with the counts.
        count: (experts,) integers.
        experts: Number of experts; None for the number of counts.
        rows: Number of rows.

    Raises:
        TypeError: If the counts are not integers.
        ValueError: If their number is wrong, or known ones are negative or add up to more than `rows`.
    """
    counts = integer_array(op, name, count)
    check_shape(op, name, counts, ("E",), {} if experts is None else {"E": experts})
    check_known(op, name, counts, 0, rows, "the rows")
    if is_known(counts) and counts.astype(np.int64).sum() > rows:
        raise ValueError(f"{op}: {name} must add up to at most the {rows} rows, got {counts.astype(np.int64).sum()}.")
    counts = jnp.asarray(counts)
    return counts if counts.dtype == jnp.int32 else narrowed(counts, 0, rows)


def rows_by_count(op: str, name: str, count: Any, experts: int | None, rows: int) -> Rows:
    """Returns the expert of each row from the row counts; the rows' tokens are not known.

    Arguments and errors are the same as for `checked_counts`.
    """
    counts = checked_counts(op, name, count, experts, rows)
    expert, fit = rows_by_count_kernel(counts, rows=rows)
    offset = jnp.where(expert < counts.size, jnp.arange(rows, dtype=jnp.int32), -1)
    return Rows(offset, expert, jnp.where(fit, counts, 0), fit)


def places(offset: jax.Array, topk: int, shared: Shared) -> jax.Array:
    """Returns the token of each row (R,), including shared rows; unused rows have any token."""
    mine = shared.first + jnp.arange(shared.tokens, dtype=jnp.int32)
    before_it = jnp.broadcast_to(mine[None], (shared.experts, shared.tokens)).reshape(shared.rows)
    return jnp.concatenate([before_it, jnp.maximum(offset, 0) // max(topk, 1)])


def spread(tokens: jax.Array, rows: Rows, topk: int, shared: Shared) -> jax.Array:
    """Returns the token (T, C) of each row: (R, C), zeros for rows that are not used, nan if there are too few."""
    if rows.token is not None and not shared.rows:
        return copied(tokens, rows.token, rows)
    return copied(tokens, _only_used(places(rows.offset, topk, shared), rows, shared), rows)


def copied(x: jax.Array, at: jax.Array, rows: Rows) -> jax.Array:
    """Returns the rows of tokens x (T, C) at `at` (R,), as `pick_rows` does, copying the rows of one token together.

    Adjacent rows belong to one expert and to tokens far apart: a token evicted from a GPU's cache in between would be
    read from memory for each of its experts.
    """
    place = rows.place
    if place is None or place.size != at.size or x.size * x.dtype.itemsize <= _CACHED_BYTES:
        return pick_rows(x, at)
    with kernel_code():  # every row has one place
        order = jnp.zeros_like(place).at[place].set(jnp.arange(place.size, dtype=jnp.int32), unique_indices=True)
    return pick_rows(x, at, order)


def numbers_of_experts(rows: Rows, shared: Shared) -> jax.Array:
    """Returns the expert of each row (R,), shared rows first; -1 for unused rows, -2 if there are too few rows."""
    before_it = jax.lax.broadcasted_iota(jnp.int32, (shared.experts, shared.tokens), 0).reshape(shared.rows)
    return _only_used(jnp.concatenate([before_it, rows.expert + shared.experts]), rows, shared)


def _only_used(numbers: jax.Array, rows: Rows, shared: Shared) -> jax.Array:
    """Returns `numbers` (R,), with -1 for unused rows, or -2 for all rows if there are too few."""
    instead = jnp.where(rows.fit, jnp.where(rows.offset >= 0, 0, NO_ROW), WRONG)
    instead = jnp.concatenate([jnp.zeros((shared.rows,), jnp.int32), instead])
    return jnp.where(instead < 0, instead, numbers)


def own_rows(rows: Rows) -> jax.Array:
    """Returns the rows (tokens * topk,) of tokens that are known."""
    if rows.row is None:
        raise ValueError("own_rows: expected rows of known tokens, got rows by count.")
    return rows.row


def rows_of_tokens(offset: jax.Array, tokens: int, topk: int) -> jax.Array:
    """Returns the row (T, topk) of each token and rank.

    It is -1 where there is no row, -2 where there are several, and -2 everywhere if an offset is past the end.
    """
    return rows_of_tokens_kernel(offset, places=tokens * topk)[0].reshape(tokens, topk)


# Products and sums are two steps, or a compiler could contract them.
_weighted: Any = elementwise(weighted)


@functools.cache
def _total(dtype: Any) -> Any:
    return elementwise(functools.partial(total, dtype=dtype))


def rows_or_any(rows: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the rows (T, topk, C) of the tokens; an arbitrary row where a token has none."""
    if rows.shape[0] == 0:
        return jnp.zeros((*row.shape, rows.shape[1]), rows.dtype)
    with kernel_code():  # whole rows, copied
        return jnp.take(whole_array(rows), row, axis=0, mode="clip")


def combine(rows: jax.Array, row: jax.Array, weights: jax.Array, shared: Shared, dtype: Any) -> jax.Array:
    """Adds each token's rows in float32: by rank in its top k, each times its weight, then shared experts in order.

    Args:
        rows: (R, C), the rows of shared experts first.
        row: (T, topk) int32, from `rows_of_tokens`.
        weights: (T, topk).
        shared: The rows of shared experts.
        dtype: Dtype of the result.

    Returns:
        (T, C), rounded once; +0 rather than -0. A missing row counts as zero.
    """
    tokens, topk = row.shape
    parts = _weighted(rows_or_any(rows[shared.rows :], row), weights[..., None], (row >= 0)[..., None])
    after = tokens - shared.first - shared.tokens
    before_it = shared.of_expert(rows).astype(jnp.float32)
    before_it = jnp.pad(before_it, ((0, 0), (shared.first, after), (0, 0)))
    terms = [parts[:, i] for i in range(topk)] + [before_it[i] for i in range(shared.experts)]
    if not terms:
        return jnp.zeros((tokens, rows.shape[1]), dtype)
    return _total(dtype)(*terms)
