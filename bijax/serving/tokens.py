"""Tokens of a sequence, in arrays of 32-bit integers: bytes are copied, hashed and sent, not Python's integers."""

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

type Tokens = array[int]


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Returns tokens in an array.

    Raises:
        ValueError: If one has more than 32 bits.
    """
    try:
        return array("i", struct.pack(f"{len(tokens)}i", *tokens))  # half the time of array("i", tokens)
    except struct.error as error:
        raise ValueError(f"tokens must be integers of 32 bits: {error}.") from None


def read_prompt(prompt: Any, vocab_size: int) -> tuple[tuple[int, ...], Tokens]:
    """Returns the tokens of a prompt, as a tuple and packed.

    Raises:
        TypeError: If it is not a sequence of integers.
        ValueError: If it is empty, or a token is outside the vocabulary.
    """
    if isinstance(prompt, (str, bytes)):
        raise TypeError(f"Engine: a prompt must be a sequence of tokens, got {type(prompt).__name__}; encode it first.")
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        remedy = "; convert it with .tolist()" if hasattr(prompt, "tolist") else ""
        raise TypeError(f"Engine: a prompt must be a sequence of tokens, got {type(prompt).__name__}{remedy}.")
    # Prompts of thousands of tokens are checked without a Python loop.
    if list(map(type, prompt)).count(int) < len(prompt):
        wrong = [t for t in prompt if isinstance(t, bool) or not isinstance(t, (int, np.integer))]
        if wrong:
            raise TypeError(f"Engine: the tokens of a prompt must be integers, got {wrong[0]!r}.")
        prompt = list(map(int, prompt))
    if not prompt:
        raise ValueError("Engine: a prompt must have at least one token, got none.")
    try:
        tokens = as_tokens(prompt)
        inside = bool(np.frombuffer(tokens, np.uint32).max() < vocab_size)
    except ValueError:
        inside = False
    if not inside:
        outside = next(t for t in prompt if not 0 <= t < vocab_size)
        raise ValueError(f"Engine: the tokens of a prompt must be from 0 to {vocab_size - 1}, got {outside}.")
    return tuple(prompt), tokens
