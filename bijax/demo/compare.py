"""Texts compared with the ones generated alone, bit by bit."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bijax.testing import bits


@dataclasses.dataclass(frozen=True)
class Text:
    """A model's output for one prompt.

    Attributes:
        tokens: Token ids, integer array of shape (tokens,).
        logprobs: Their log-probabilities, floating array of the same shape.
    """

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A text compared with the one generated alone from the same prompt.

    After the texts diverge, tokens have different contexts and cannot be compared one by one: the common prefix is
    compared, and the rest is counted as `parted`.

    Attributes:
        prompt: Index of the prompt.
        other: The text.
        distances: Absolute differences of the log-probabilities, float64 array over the common beginning.
        differing: Where their bits differ, bool array over the common beginning.
        parted: Tokens after the common beginning, of the longer text.
    """

    prompt: int
    other: Text
    distances: np.ndarray
    differing: np.ndarray
    parted: int

    @property
    def common(self) -> int:
        """Tokens of the common beginning."""
        return int(self.distances.size)


def compare(prompt: int, alone: Text, other: Text) -> Comparison:
    """Compares the texts of one prompt.

    Example:
        >>> alone = Text(np.array([5, 6, 7]), np.array([-1, -2, -3], np.float32))
        >>> other = Text(np.array([5, 6, 8]), np.array([-1, -2.5, -3], np.float32))
        >>> found = compare(0, alone, other)
        >>> found.distances, found.differing, found.parted
        (array([0. , 0.5]), array([False,  True]), 1)
    """
    shorter, longer = sorted((len(alone.tokens), len(other.tokens)))
    unequal = np.flatnonzero(alone.tokens[:shorter] != other.tokens[:shorter])
    common = int(unequal[0]) if unequal.size else shorter
    ours, theirs = alone.logprobs[:common], other.logprobs[:common]
    distances = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    return Comparison(prompt, other, distances, bits(ours) != bits(theirs), longer - common)


@dataclasses.dataclass(frozen=True)
class Figures:
    """The summary of one way of computing, or of all of them.

    Attributes:
        texts: Texts compared with the ones generated alone.
        texts_differing: Texts with different tokens.
        tokens: Tokens in the common beginnings, whose log-probabilities were compared.
        tokens_differing: Those whose log-probabilities differ in any bit.
        tokens_parted: Tokens that could not be compared, since the texts had diverged before.
        largest_difference: Largest absolute difference of two log-probabilities compared.
    """

    texts: int
    texts_differing: int
    tokens: int
    tokens_differing: int
    tokens_parted: int
    largest_difference: float

    @property
    def identical(self) -> bool:
        """Whether something was compared and no bit differed."""
        return self.tokens > 0 and self.tokens_differing == self.texts_differing == 0


def figures(comparisons: Sequence[Comparison]) -> Figures:
    """Adds up the comparisons of one or several ways of computing."""
    return Figures(
        texts=len(comparisons),
        texts_differing=sum(found.parted > 0 for found in comparisons),
        tokens=sum(found.common for found in comparisons),
        tokens_differing=sum(int(found.differing.sum()) for found in comparisons),
        tokens_parted=sum(found.parted for found in comparisons),
        largest_difference=max((float(found.distances.max()) for found in comparisons if found.common), default=0.0),
    )
