"""Two short sequences of tokens, and the log-probabilities that logits give them."""

import functools

import numpy as np

from tests.layers.checkpoint_files import VOCAB

LENGTHS = (22, 9)


@functools.cache
def sequences() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.integers(0, VOCAB, length).astype(np.int32) for length in LENGTHS)


def log_probabilities(logits: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns those of the tokens (T,) after the first, from logits (T, V)."""
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found: np.ndarray = logprobs[np.arange(len(row) - 1), row[1:]]
    return found
