"""Texts compared with the ones generated alone, bit by bit."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bijax.testing import bits, ulp_distance


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
        ulps: Distance of the log-probabilities, uint64 array over the common beginning.
        differing: Where their bits differ, bool array over the common beginning.
        parted: Tokens after the common beginning, of the longer text.
    """

    prompt: int
    other: Text
    ulps: np.ndarray
    differing: np.ndarray
    parted: int


def compare(prompt: int, alone: Text, other: Text) -> Comparison:
    """Compares the texts of one prompt.

    Example:
        >>> alone = Text(np.array([5, 6, 7]), np.array([-1, -2, -3], np.float32))
        >>> other = Text(np.array([5, 6, 8]), np.array([-1, -2.0000002, -3], np.float32))
        >>> found = compare(0, alone, other)
        >>> found.ulps, found.differing, found.parted
        (array([0, 1], dtype=uint64), array([False,  True]), 1)
    """
    shorter, longer = sorted((len(alone.tokens), len(other.tokens)))
    unequal = np.flatnonzero(alone.tokens[:shorter] != other.tokens[:shorter])
    common = int(unequal[0]) if unequal.size else shorter
    ours, theirs = alone.logprobs[:common], other.logprobs[:common]
    return Comparison(prompt, other, ulp_distance(ours, theirs), bits(ours) != bits(theirs), longer - common)


@dataclasses.dataclass(frozen=True)
class Figures:
    """The summary of one way of computing, or of all of them.

    Attributes:
        texts: Texts compared with the ones generated alone.
        texts_differing: Texts with different tokens.
        unique_texts: Distinct texts per prompt, including the one generated alone, summed over prompts: equals the
            number of prompts if nothing differs.
        tokens: Tokens in the common beginnings, whose log-probabilities were compared.
        tokens_differing: Those whose log-probabilities differ in any bit.
        tokens_parted: Tokens that could not be compared, since the texts had parted before.
        largest_ulp: Largest distance of two log-probabilities compared.
    """

    texts: int
    texts_differing: int
    unique_texts: int
    tokens: int
    tokens_differing: int
    tokens_parted: int
    largest_ulp: int

    @property
    def identical(self) -> bool:
        """Whether something was compared and no bit differed."""
        return self.tokens > 0 and self.tokens_differing == self.texts_differing == 0


def figures(alone: Sequence[Text], comparisons: Sequence[Comparison]) -> Figures:
    """Adds up comparisons.

    Args:
        alone: The texts generated alone, by prompt.
        comparisons: The comparisons of one or several ways of computing.
    """
    unique = {(prompt, *text.tokens.tolist()) for prompt, text in enumerate(alone)}
    unique |= {(found.prompt, *found.other.tokens.tolist()) for found in comparisons}
    return Figures(
        texts=len(comparisons),
        texts_differing=sum(found.parted > 0 for found in comparisons),
        unique_texts=len(unique),
        tokens=sum(found.ulps.size for found in comparisons),
        tokens_differing=sum(int(found.differing.sum()) for found in comparisons),
        tokens_parted=sum(found.parted for found in comparisons),
        largest_ulp=max((int(found.ulps.max()) for found in comparisons if found.ulps.size), default=0),
    )
