"""Rows sorted by expert: where the tokens of a mixture of experts stand on one rank, and the way back."""

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
from bijax.ops._pick import pick_rows
from bijax.ops.elementwise import elementwise
from pallas_kernels.parts.no_row import NO_ROW, WRONG


@dataclass(frozen=True)
class Shared:
    """The rows of shared experts, which stand in front: for each of them the same tokens.

    Attributes:
        experts: Shared experts of the rank.
        first: First of the tokens that they compute here.
        tokens: How many tokens that is.
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
        TypeError: If a number is no integer.
        ValueError: If there are no such tokens.
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


_CACHED_BYTES: Final = 1 << 24  # that stay in a GPU's cache while rows are written past them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Which token and expert each of the rows of a rank has, those of shared experts not counted.

    Attributes:
        offset: (A,) int32, token * topk + rank of the expert in the token's top k; -1 for rows that are not used.
        expert: (A,) int32, counted from the first expert of the rank; the number of experts for rows not used.
        count: (experts,) int32, the rows of each expert.
        fit: Bool, whether there are rows enough for the tokens.
        place: (tokens * topk,) int32, the places of all tokens' experts in the order of rows, those without one last;
            None if the tokens are not known.
    """

    offset: jax.Array
    expert: jax.Array
    count: jax.Array
    fit: jax.Array
    place: jax.Array | None = None


def sort_by_expert(op: str, selected: Any, first: int, end: int, allocated: int) -> Rows:
    """Gives rows to the tokens of the experts in [first, end): experts upwards, tokens of an expert upwards.

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
    number = jnp.asarray(selected)
    number = number if number.dtype == jnp.int32 else narrowed(number, first, end - 1)
    return Rows(*sort_kernel(number.reshape(-1), first=first, end=end, allocated=allocated))


def expert_range(op: str, first: Any, end: Any) -> tuple[int, int]:
    """Returns the experts of a rank, [first, end).

    Raises:
        TypeError: If one is no integer.
        ValueError: If there are no such experts.
    """
    start, stop = integer(op, "expert_start_idx", first), integer(op, "expert_end_idx", end)
    if not 0 <= start <= stop:
        raise ValueError(
            f"{op}: expert_start_idx and expert_end_idx must hold 0 <= expert_start_idx <= expert_end_idx, got {start}"
            f" and {stop}."
        )
    return start, stop


def checked_counts(op: str, name: str, count: Any, experts: int | None, rows: int) -> jax.Array:
    """Returns the rows of each expert as int32, in which a traced number may be negative or more than all rows.

    Args:
        op: Name of the operation.
        name: Name of the argument with the counts.
        count: (experts,) integers.
        experts: How many experts there are; None for as many as counts.
        rows: Rows that there are.

    Raises:
        TypeError: If the counts are no integers.
        ValueError: If there are not as many, or known ones are negative or add up to more rows than there are.
    """
    counts = integer_array(op, name, count)
    check_shape(op, name, counts, ("E",), {} if experts is None else {"E": experts})
    check_known(op, name, counts, 0, rows, "the rows")
    if is_known(counts) and counts.astype(np.int64).sum() > rows:
        raise ValueError(f"{op}: {name} must add up to at most the {rows} rows, got {counts.astype(np.int64).sum()}.")
    counts = jnp.asarray(counts)
    return counts if counts.dtype == jnp.int32 else narrowed(counts, 0, rows)


def rows_by_count(op: str, name: str, count: Any, experts: int | None, rows: int) -> Rows:
    """Returns which expert each row has, given the rows of each; the rows' tokens are not known.

    The arguments and the errors are those of `checked_counts`.
    """
    counts = checked_counts(op, name, count, experts, rows)
    expert, fit = rows_by_count_kernel(counts, rows=rows)
    offset = jnp.where(expert < counts.size, jnp.arange(rows, dtype=jnp.int32), -1)
    return Rows(offset, expert, jnp.where(fit, counts, 0), fit)


def places(offset: jax.Array, topk: int, shared: Shared) -> jax.Array:
    """Returns the token of each of all rows (R,); for rows that are not used, any."""
    mine = shared.first + jnp.arange(shared.tokens, dtype=jnp.int32)
    in_front = jnp.broadcast_to(mine[None], (shared.experts, shared.tokens)).reshape(shared.rows)
    return jnp.concatenate([in_front, jnp.maximum(offset, 0) // max(topk, 1)])


def spread(tokens: jax.Array, rows: Rows, topk: int, shared: Shared) -> jax.Array:
    """Returns the token (T, C) of each row: (R, C), zeros for rows that are not used, nan if there are too few."""
    return copied(tokens, _only_used(places(rows.offset, topk, shared), rows, shared), rows)


def copied(x: jax.Array, at: jax.Array, rows: Rows) -> jax.Array:
    """Returns the rows of tokens x (T, C) at `at` (R,), as `pick_rows` does, the rows of one token together.

    Rows that stand together are of one expert, and of tokens far apart: a token that has left a GPU's cache meanwhile
    would be read from memory for each of its experts.
    """
    place = rows.place
    if place is None or place.size != at.size or x.size * x.dtype.itemsize <= _CACHED_BYTES:
        return pick_rows(x, at)
    with kernel_code():  # every row has one place
        order = jnp.zeros_like(place).at[place].set(jnp.arange(place.size, dtype=jnp.int32), unique_indices=True)
    return pick_rows(x, at, order)


def numbers_of_experts(rows: Rows, shared: Shared) -> jax.Array:
    """Returns the expert of each of all rows (R,), shared ones first; -1 if it is not used, -2 if they are too few."""
    in_front = jax.lax.broadcasted_iota(jnp.int32, (shared.experts, shared.tokens), 0).reshape(shared.rows)
    return _only_used(jnp.concatenate([in_front, rows.expert + shared.experts]), rows, shared)


def _only_used(numbers: jax.Array, rows: Rows, shared: Shared) -> jax.Array:
    """Returns a number of each of all rows (R,); -1 for rows that are not used, -2 for all if there are too few."""
    instead = jnp.where(rows.fit, jnp.where(rows.offset >= 0, 0, NO_ROW), WRONG)
    instead = jnp.concatenate([jnp.zeros((shared.rows,), jnp.int32), instead])
    return jnp.where(instead < 0, instead, numbers)


def rows_of_tokens(offset: jax.Array, tokens: int, topk: int) -> jax.Array:
    """Returns the row (T, topk) of each token and rank.

    It is -1 where there is none, -2 where there are several, and -2 everywhere if a row has a place behind the last.
    """
    return rows_of_tokens_kernel(offset, places=tokens * topk)[0].reshape(tokens, topk)


# Products and sums are two steps, or a compiler could contract them.
_weighted: Any = elementwise(
    lambda row, weight, used: jnp.where(used, row.astype(jnp.float32) * weight.astype(jnp.float32), jnp.float32(0))
)


@functools.cache
def _total(dtype: Any) -> Any:
    def add(*terms: jax.Array) -> jax.Array:
        total = functools.reduce(lambda a, b: a + b, terms)
        # The sign of a zero would tell which experts are on other ranks.
        return jnp.where(total == 0, jnp.float32(0), total).astype(dtype)

    return elementwise(add)


def rows_or_any(rows: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the rows (T, topk, C) of the tokens; where there is none, any."""
    if rows.shape[0] == 0:
        return jnp.zeros((*row.shape, rows.shape[1]), rows.dtype)
    with kernel_code():  # whole rows, copied
        return jnp.take(whole_array(rows), row, axis=0, mode="clip")


def combine(rows: jax.Array, row: jax.Array, weights: jax.Array, shared: Shared, dtype: Any) -> jax.Array:
    """Adds the rows of each token in float32: by rank in its top k, each times its weight, then shared experts upwards.

    Args:
        rows: (R, C), those of shared experts in front.
        row: (T, topk) int32, from `rows_of_tokens`.
        weights: (T, topk).
        shared: The rows of shared experts.
        dtype: Dtype of the result.

    Returns:
        (T, C), rounded once; +0 rather than -0. A row that is missing counts as a zero.
    """
    tokens, topk = row.shape
    parts = _weighted(rows_or_any(rows[shared.rows :], row), weights[..., None], (row >= 0)[..., None])
    behind = tokens - shared.first - shared.tokens
    in_front = shared.of_expert(rows).astype(jnp.float32)
    in_front = jnp.pad(in_front, ((0, 0), (shared.first, behind), (0, 0)))
    terms = [parts[:, i] for i in range(topk)] + [in_front[i] for i in range(shared.experts)]
    if not terms:
        return jnp.zeros((tokens, rows.shape[1]), dtype)
    return _total(dtype)(*terms)
