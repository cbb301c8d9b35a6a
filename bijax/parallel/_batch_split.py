"""How a batch of sequences is split in two, for overlapping the halves: numbers alone, on the host."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from bijax.core.checks import integer

TOKEN_DISTRIBUTION_THRESHOLD = 0.48
"""Least part of the tokens that a half must have if no sequence is cut."""


@dataclasses.dataclass(frozen=True)
class ChildBatch:
    """One half of a batch.

    Attributes:
        pieces: For each of its sequences (index in the parent, first token, end).
        parent_token_range: Its tokens among those of the parent, (first, end), where sequences come one after another.
    """

    pieces: tuple[tuple[int, int, int], ...]
    parent_token_range: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.parent_token_range[1] - self.parent_token_range[0]

    def padded_length(self, multiple: int) -> int:
        """Returns the number of tokens, rounded up to a multiple: of the devices that share them.

        Raises:
            TypeError: If `multiple` is not an integer.
            ValueError: If it is not positive.
        """
        multiple = integer("ChildBatch.padded_length", "multiple", multiple)
        if multiple < 1:
            raise ValueError(f"ChildBatch.padded_length: multiple must be positive, got {multiple}.")
        return -(-self.num_tokens // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """Where a batch is split: between two sequences, or inside of one, which makes two chunks of it.

    The first half is the first `sequences` sequences and the first `tokens` tokens of the next one.

    Args:
        sequences: Whole sequences of the first half.
        tokens: Tokens of the next sequence that belong to the first half.

    Raises:
        TypeError: If one is not an integer.
        ValueError: If one is negative, or both are 0.

    Example:
        >>> first, second = BatchSplit(1, 2).children([3, 5, 1])
        >>> first.pieces, first.parent_token_range
        (((0, 0, 3), (1, 0, 2)), (0, 5))
        >>> second.pieces, second.parent_token_range, second.padded_length(8)
        (((1, 2, 5), (2, 0, 1)), (5, 9), 8)
    """

    sequences: int
    tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("sequences", "tokens"):
            if integer("BatchSplit", name, getattr(self, name)) < 0:
                raise ValueError(f"BatchSplit: {name} must not be negative, got {getattr(self, name)}.")
        if not self.sequences and not self.tokens:
            raise ValueError("BatchSplit: the first half must have sequences or tokens, got none of both.")

    def children(self, lengths: Sequence[int]) -> tuple[ChildBatch, ChildBatch]:
        """Returns the halves of a batch.

        Args:
            lengths: Tokens of each sequence.

        Raises:
            TypeError: If a length is not an integer.
            ValueError: If one is negative, or the split is not inside of the batch.
        """
        lengths = _lengths("BatchSplit.children", lengths)
        inside = self.sequences < len(lengths) and (not self.tokens or self.tokens < lengths[self.sequences])
        if not inside:
            raise ValueError(
                f"BatchSplit: {self.sequences} sequences and {self.tokens} tokens must be less than the batch, got one"
                f" with sequences of {lengths} tokens."
            )
        pieces = [(index, 0, length) for index, length in enumerate(lengths)]
        first, second = pieces[: self.sequences], pieces[self.sequences :]
        if self.tokens:
            index, _, end = second[0]
            first, second = [*first, (index, 0, self.tokens)], [(index, self.tokens, end), *second[1:]]
        middle = sum(lengths[: self.sequences]) + self.tokens
        return ChildBatch(tuple(first), (0, middle)), ChildBatch(tuple(second), (middle, sum(lengths)))


def split_decode(sequences: int) -> BatchSplit | None:
    """Splits a batch whose sequences have equally many tokens, as in decoding: half of the sequences each.

    Args:
        sequences: Number of sequences.

    Returns:
        The split; of an odd number the second half has one more. None where there are not two sequences.

    Raises:
        TypeError: If the number is not an integer.
        ValueError: If it is negative.

    Source: the two batch overlap of SGLang (https://github.com/sgl-project/sglang).

    Example:
        >>> split_decode(5), split_decode(1)
        (BatchSplit(sequences=2, tokens=0), None)
    """
    if integer("bijax.parallel.split_decode", "sequences", sequences) < 0:
        raise ValueError(f"bijax.parallel.split_decode: sequences must not be negative, got {sequences}.")
    return BatchSplit(sequences // 2) if sequences > 1 else None


def split_prefill(lengths: Sequence[int], *, threshold: float = TOKEN_DISTRIBUTION_THRESHOLD) -> BatchSplit | None:
    """Splits a batch of prompts so that both halves have about equally many tokens.

    The split is between the two sequences where the sums of tokens differ least; of two such places it is the later
    one. If a half has less than `threshold` of the tokens there, one sequence is cut into two chunks instead, at half
    of all tokens.

    Args:
        lengths: Tokens of each sequence.
        threshold: From 0, with which no sequence is cut, to 0.5.

    Returns:
        The split; None where a half would have no token.

    Raises:
        TypeError: If a length is not an integer or the threshold not a number.
        ValueError: If a length is negative or the threshold out of range.

    Source: as `split_decode`.

    Example:
        >>> split_prefill([4, 4, 9]), split_prefill([10]), split_prefill([2, 20])
        (BatchSplit(sequences=2, tokens=0), BatchSplit(sequences=0, tokens=5), BatchSplit(sequences=1, tokens=9))
    """
    op = "bijax.parallel.split_prefill"
    lengths, threshold = _lengths(op, lengths), check_threshold(op, threshold)
    ends = [0, *accumulate(lengths)]
    total = ends[-1]
    between = min(range(1, len(lengths)), key=lambda i: (abs(total - 2 * ends[i]), -i), default=0)
    least = threshold * total
    if least <= ends[between] <= total - least:
        return BatchSplit(between) if 0 < ends[between] < total else None
    half = total // 2
    if not half:
        return None
    sequence = next(i for i in range(len(lengths)) if ends[i + 1] > half)
    return BatchSplit(sequence, half - ends[sequence])


def check_threshold(op: str, threshold: float) -> float:
    """Returns the threshold of `split_prefill`.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not from 0 to 0.5.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"{op}: threshold must be a number, got {threshold!r}.")
    if not 0 <= threshold <= 0.5:
        raise ValueError(
            f"{op}: threshold must be from 0 to 0.5, got {threshold}; a half has at most 0.5 of the tokens."
        )
    return float(threshold)


def _lengths(op: str, lengths: Sequence[int]) -> list[int]:
    found = [integer(op, "lengths", length) for length in lengths]
    if any(length < 0 for length in found):
        raise ValueError(f"{op}: lengths must not be negative, got {found}.")
    return found
