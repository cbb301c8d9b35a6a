"""Single tokens as texts and bytes, and log-probabilities as JSON can hold them."""

import functools
import math
from collections.abc import Iterable

from .model import Tokenizer

LOWEST = -9999.0  # stands for -inf, which JSON has not; vLLM writes the same


class TokenText:
    """What tokens stand for, remembered.

    Args:
        tokenizer: None knows no texts.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._remembered = functools.lru_cache(maxsize=2**16)(self._read)

    def text(self, token: int) -> str:
        """The text of a token, U+FFFD for bytes that are no whole character; the id as digits without a tokenizer."""
        return self._remembered(token)[0]

    def bytes(self, token: int) -> list[int] | None:
        """The bytes of a token."""
        return self._remembered(token)[1]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of several tokens; nothing without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens)

    def _read(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return str(token), None
        try:
            return self._tokenizer.decode([token]), list(self._tokenizer.token_bytes(token))
        except ValueError:  # vocabularies are padded with tokens that stand for nothing
            return "", []


def json_logprob(logprob: float) -> float | None:
    """A log-probability for JSON. Its float32 bits survive: digits enough for a float64 are written.

    Example:
        >>> json_logprob(-1.5), json_logprob(float("-inf")), json_logprob(float("nan"))
        (-1.5, -9999.0, None)
    """
    if math.isnan(logprob):
        return None
    return logprob if math.isfinite(logprob) else math.copysign(LOWEST, logprob)
