"""Seeds of 64 bits as two words of 32, which JAX has without its 64-bit mode."""

from collections.abc import Sequence

import numpy as np

LOWEST_SEED = -(2**63)
HIGHEST_SEED = 2**64 - 1


def seed_words(seeds: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns seeds as words for `sample`.

    Args:
        seeds: (R,) Python or NumPy integers from -2**63 to 2**64 - 1; a negative one is taken modulo 2**64.

    Returns:
        (R, 2) uint32: the high and the low word.

    Raises:
        TypeError: If a seed is not an integer.
        ValueError: If one is out of range.

    Example:
        >>> seed_words([1, 2**32 + 7, -1]).tolist()
        [[0, 1], [1, 7], [4294967295, 4294967295]]
    """
    if isinstance(seeds, str) or not isinstance(seeds, (Sequence, np.ndarray)):
        raise TypeError(f"seed_words: expected a sequence of integers, got {type(seeds).__name__}.")
    words = np.empty((len(seeds), 2), np.uint32)
    for row, seed in enumerate(seeds):
        if isinstance(seed, (bool, np.bool)) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed_words: a seed must be an integer, got {seed!r}.")
        value = int(seed)
        if not LOWEST_SEED <= value <= HIGHEST_SEED:
            raise ValueError(f"seed_words: a seed must be from -2**63 to 2**64 - 1, got {value}.")
        words[row] = ((value >> 32) & 0xFFFFFFFF, value & 0xFFFFFFFF)
    return words
