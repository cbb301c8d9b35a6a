"""The layout of the tokens of sequences: padded to one length, or packed one sequence after another."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe, integer, integer_array
from bijax.ops._engine_arguments import capped_sums, check_known, check_shape, is_known, narrowed


@dataclass(frozen=True)
class Tokens:
    """The sequence of each token, and its place in it.

    Attributes:
        sequence: int32 of the tokens' dimensions, in [0, B) where the token belongs to a sequence.
        index: int32, the place of the token in its sequence, 0 for the first one.
        inside: Which tokens belong to a sequence; the others are padding.
        lengths: (B,) int32, the tokens of each sequence. A NumPy array if they are known.
        valid: (B,) bool, False for sequences with traced lengths that are out of range. Of packed sequences, either all
            are valid or none, since the place of each follows from the others.
    """

    sequence: jax.Array
    index: jax.Array
    inside: jax.Array
    lengths: Any
    valid: jax.Array

    @property
    def known(self) -> bool:
        """Whether the lengths are known while the program is traced."""
        return is_known(self.lengths)

    @property
    def padding(self) -> jax.Array:
        """The tokens that belong to no sequence (all False if the lengths are invalid)."""
        return ~self.inside & self.of_tokens(self.valid, True)

    def of_tokens(self, numbers: Any, otherwise: int) -> jax.Array:
        """Returns numbers (B,) of the sequences as numbers of their tokens.

        Padding gets an arbitrary sequence's number, or `otherwise` if there is no sequence.
        """
        numbers = jnp.asarray(numbers)
        if numbers.shape[0] == 0:
            return jnp.full(self.sequence.shape, otherwise, numbers.dtype)
        return jnp.take(numbers, self.sequence, mode="clip")


@dataclass(frozen=True)
class Names:
    """An operation's names for the lengths of sequences, for messages.

    Attributes:
        lengths: The lengths.
        sums: Cumulative token counts, from 0.
        longest: The largest length allowed.
    """

    lengths: str = "q_lens"
    sums: str = "accum_q_len"
    longest: str = "max_q_len"


_NAMES = Names()


def locate_tokens(
    op: str,
    lead: tuple[int, ...],
    q_lens: Any,
    accum_q_len: Any,
    max_q_len: int | None,
    *,
    name: str,
    names: Names = _NAMES,
) -> Tokens:
    """Finds the sequence of each token.

    Args:
        op: Name of the operation.
        lead: The tokens' dimensions: (B, L) if they are padded, (T,) if they are packed.
        q_lens: (B,) ints, the tokens of each sequence; all L by default, or the differences of `accum_q_len`.
        accum_q_len: (B + 1,) ints, for packed tokens: cumulative token counts, from 0; the running sums of `q_lens` by
            default.
        max_q_len: The largest length allowed, or None.
        name: Name of the argument with the tokens, for messages.
        names: Names of the others.

    Raises:
        TypeError: If lengths are not integers.
        ValueError: If shapes do not fit, or known lengths are out of range or contradict each other.
    """
    limit = lead[-1]
    if max_q_len is not None:
        limit = min(limit, integer(op, names.longest, max_q_len))
        if limit < 0:
            raise ValueError(f"{op}: {names.longest} must be at least 0, got {max_q_len}.")
    lengths = None if q_lens is None else integer_array(op, names.lengths, q_lens)
    accumulated = None if accum_q_len is None else integer_array(op, names.sums, accum_q_len)
    if lengths is not None:
        check_shape(op, names.lengths, lengths, (lead[0] if len(lead) == 2 else "sequences",), {})
        check_known(op, names.lengths, lengths, 0, limit, f"the tokens that {name} holds, or {names.longest}")
    if len(lead) == 2:
        if accumulated is not None:
            raise ValueError(
                f"{op}: {names.sums} belongs to packed tokens, got it together with {name} of the dimensions {lead}."
            )
        return _padded(lead, np.full(lead[:1], limit, np.int32) if lengths is None else lengths, limit)
    return _packed(op, lead[0], lengths, accumulated, limit, name, names)


def _padded(lead: tuple[int, ...], lengths: Any, limit: int) -> Tokens:
    rows, valid = _in_range(lengths, limit)
    sequence = jnp.broadcast_to(jnp.arange(lead[0], dtype=jnp.int32)[:, None], lead)
    index = jnp.broadcast_to(jnp.arange(lead[1], dtype=jnp.int32)[None], lead)
    return Tokens(sequence, index, index < jnp.asarray(rows)[:, None], rows, valid)


def _packed(op: str, tokens: int, lengths: Any, accumulated: Any, limit: int, name: str, names: Names) -> Tokens:
    if lengths is None and accumulated is None:
        raise ValueError(
            f"{op}: packed tokens need {names.lengths} or {names.sums}, got neither for {name} of {tokens} tokens."
        )
    if accumulated is not None:
        check_shape(op, names.sums, accumulated, ("sequences + 1" if lengths is None else len(lengths) + 1,), {})
        if len(accumulated) == 0:
            raise ValueError(f"{op}: {names.sums} must start with 0, got {describe(accumulated)}.")
        check_known(op, names.sums, accumulated, 0, tokens, f"the tokens of {name}")
    if is_known(lengths, accumulated):
        return _known_packed(op, tokens, lengths, accumulated, limit, name, names)
    ends = None if accumulated is None else narrowed(accumulated, 0, tokens)
    rows = ends[1:] - ends[:-1] if lengths is None and ends is not None else narrowed(lengths, 0, limit)
    in_range = (rows >= 0) & (rows <= limit)
    # Clamped so that the sum cannot overflow before it is seen to be too large.
    summed = jnp.concatenate([jnp.zeros(1, jnp.int32), capped_sums(jnp.where(in_range, rows, 0), tokens + 1)])
    starts = summed if ends is None else ends
    right = jnp.all(in_range) & (summed[-1] <= tokens) & jnp.all(starts == summed)
    return _from_starts(tokens, jnp.where(right, starts, 0), jnp.where(in_range, rows, 0), jnp.full(rows.shape, right))


def _known_packed(op: str, tokens: int, lengths: Any, accumulated: Any, limit: int, name: str, names: Names) -> Tokens:
    if lengths is None:
        lengths = np.diff(accumulated.astype(np.int64))
        check_known(op, f"the differences of {names.sums}", lengths, 0, limit, "the lengths of the sequences")
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.astype(np.int64))])
    if accumulated is not None and (starts != accumulated).any():
        raise ValueError(
            f"{op}: {names.sums} must hold 0 and the running sums of the lengths, {starts.tolist()}, got"
            f" {accumulated.tolist()}."
        )
    if starts[-1] > tokens:
        raise ValueError(
            f"{op}: {names.lengths} must add up to at most the {tokens} tokens of {name}, got {starts[-1]}."
        )
    return _from_starts(
        tokens, jnp.asarray(starts.astype(np.int32)), lengths.astype(np.int32), jnp.full(lengths.shape, True)
    )


def _from_starts(tokens: int, starts: jax.Array, lengths: Any, valid: jax.Array) -> Tokens:
    token = jnp.arange(tokens, dtype=jnp.int32)
    # Of sequences without tokens several start in one place; the last one before the next token has it.
    sequence = jnp.searchsorted(starts[1:], token, side="right").astype(jnp.int32)
    index = token - jnp.take(starts, sequence, mode="clip")
    return Tokens(sequence, index, token < starts[-1], lengths, valid)


def _in_range(lengths: Any, limit: int) -> tuple[Any, jax.Array]:
    if is_known(lengths):
        return lengths.astype(np.int32), jnp.full(lengths.shape, True)
    rows = narrowed(lengths, 0, limit)
    return jnp.maximum(rows, 0), rows >= 0
