"""Drafts for speculative decoding: what followed the last tokens when they came before, or what a head drafts."""

from collections.abc import Sequence

_LONGEST = 4


def look_up(tokens: Sequence[int], number: int) -> list[int]:
    """Returns up to `number` tokens that may come next, by prompt lookup.

    The longest of the last 4, 3 and 2 tokens that occurs earlier in the sequence counts, at its last occurrence.

    Source: A. Saxena, "Prompt lookup decoding" (https://github.com/apoorvumang/prompt-lookup-decoding).

    Example:
        >>> look_up([1, 2, 3, 4, 9, 1, 2], 2)
        [3, 4]
    """
    for length in range(min(_LONGEST, len(tokens) - 1), 1, -1):
        suffix = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start] == suffix[0] and list(tokens[start : start + length]) == suffix:
                return list(tokens[start + length : start + length + number])
    return []
