"""Single tokens as texts and bytes, and log-probabilities as JSON can hold them."""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from bijax.serving.requests import special_token_ids

from .model import Tokenizer

LOWEST = -9999.0  # for -inf, which JSON lacks; vLLM writes the same


class _Token(NamedTuple):
    """A token: its text as `decode` has it, its bytes, its text as OpenAI writes it, and whether it has any."""

    text: str
    data: bytes
    name: str
    exists: bool = True


class TokenText:
    """The texts and bytes of tokens, cached.

    Args:
        tokenizer: None knows no texts.

    Attributes:
        tokenizer: The same.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._remembered = functools.lru_cache(maxsize=2**16)(self._read)

    def text(self, token: int) -> str:
        """The text of a token, U+FFFD for incomplete characters; the id as digits without a tokenizer."""
        return self._remembered(token).text

    def name(self, token: int) -> str:
        r"""The text of a token as OpenAI writes it: "bytes:" and the bytes where they are not whole UTF-8.

        Printable ASCII is kept as is; all other bytes and the backslash are written as `\xf0`.
        """
        return self._remembered(token).name

    def data(self, token: int) -> bytes:
        """The bytes of a token; none without a tokenizer."""
        return self._remembered(token).data

    def byte_list(self, token: int) -> list[int] | None:
        """The bytes of a token, for JSON; None without a tokenizer."""
        return None if self.tokenizer is None else list(self.data(token))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of several tokens; nothing without a tokenizer."""
        if self.tokenizer is None:
            return ""
        tokens = list(tokens)
        try:
            return self.tokenizer.decode(tokens)
        except ValueError:
            return self.tokenizer.decode([token for token in tokens if self._remembered(token).exists])

    def special(self) -> frozenset[int]:
        """The tokens that a text without special tokens leaves out."""
        return special_token_ids(self.tokenizer)

    def _read(self, token: int) -> _Token:
        if self.tokenizer is None:
            return _Token(str(token), b"", str(token))
        try:
            text, data = self.tokenizer.decode([token]), self.tokenizer.token_bytes(token)
        except ValueError:  # vocabularies are padded with unused tokens
            return _Token("", b"", "", exists=False)
        return _Token(text, data, _name(data))


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(
            chr(byte) if 0x20 <= byte < 0x7F and byte != 0x5C else f"\\x{byte:02x}" for byte in data
        )


def json_logprob(logprob: float) -> float | None:
    """A log-probability for JSON. Its float32 bits survive: digits enough for a float64 are written.

    Example:
        >>> json_logprob(-1.5), json_logprob(float("-inf")), json_logprob(float("nan"))
        (-1.5, -9999.0, None)
    """
    if math.isnan(logprob):
        return None
    return logprob if math.isfinite(logprob) else math.copysign(LOWEST, logprob)
