"""Which kind of overlap a model computes with."""

import dataclasses
from typing import Literal

from bijax.parallel._batch_split import (
    TOKEN_DISTRIBUTION_THRESHOLD,
    BatchSplit,
    check_threshold,
    split_decode,
    split_prefill,
)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What a model computes while rows travel to experts on other devices and back.

    Args:
        kind: "two_batch": two halves of a batch take turns. "single_batch": the shared experts are computed while rows
            travel to the experts, and a part of the down product while results of another part travel back.
        threshold: As for `split_prefill`; "two_batch" alone uses it.

    Raises:
        TypeError: If the threshold is not a number.
        ValueError: If there is no such kind, or the threshold is out of range.

    Example:
        >>> Overlap("two_batch").split(1, 512)
        BatchSplit(sequences=0, tokens=256)
    """

    kind: Literal["two_batch", "single_batch"]
    threshold: float = TOKEN_DISTRIBUTION_THRESHOLD

    def __post_init__(self) -> None:
        if self.kind not in ("two_batch", "single_batch"):
            raise ValueError(f"Overlap: kind must be 'two_batch' or 'single_batch', got {self.kind!r}.")
        check_threshold("Overlap", self.threshold)

    def split(self, sequences: int, length: int) -> BatchSplit | None:
        """Returns how a batch is split in which each sequence has a row of `length` tokens; None if it is not.

        Padding at the end of a row counts, for it is computed as well.

        Args:
            sequences: Number of sequences.
            length: Tokens of a row; 1 in decoding.

        Raises:
            TypeError: If a number is not an integer.
            ValueError: If one is negative.
        """
        if self.kind == "single_batch":
            return None
        return split_decode(sequences) if length == 1 else split_prefill([length] * sequences, threshold=self.threshold)
