"""Where in a text its tokens begin."""

import codecs
from collections.abc import Container

from bijax.serving.text import TextStream

from .token_text import TokenText


class TextOffsets:
    """Finds the place of each token in the text, as the tokens come one after another.

    The place of a token is the index of the character that holds its first byte, so that the tokens of one character
    share a place. Later tokens do not move it. It is found in the text of all tokens together, which is not the
    concatenation of their separate texts: bytes of a character are U+FFFD alone, and some tokenizers drop the
    space at the beginning.

    Args:
        tokens: Texts of tokens.
        left_out: Tokens that are not in the text.

    Example:
        >>> from bijax.server.token_text import TokenText
        >>> class Bytes:
        ...     def decode(self, tokens): return bytes(tokens).decode(errors="replace")
        ...     def token_bytes(self, token): return bytes([token])
        >>> offsets = TextOffsets(TokenText(Bytes()))
        >>> [offsets.add(token) for token in "a\N{EURO SIGN}b".encode()]
        [0, 1, 1, 1, 2]
    """

    def __init__(self, tokens: TokenText, left_out: Container[int] = ()) -> None:
        self._tokens = tokens
        self._left_out = left_out
        self._stream = None if tokens.tokenizer is None else TextStream(tokens.tokenizer, (), left_out)
        # Of the tokens since the text ended with a whole character: where they begin, and the characters before the one
        # that their last byte belongs to.
        self._begin = 0
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> int:
        """The place of the next token."""
        if self._stream is None:
            return 0  # there is no text
        self._stream.add(token)
        together = self._stream.tail(self._begin)
        left_out = token in self._left_out
        data = b"" if left_out else self._tokens.data(token)
        place = self._place(data)
        alone = "" if left_out else self._tokens.name(token)
        if alone and together.endswith(alone):
            place = len(together) - len(alone)
        place = self._begin + min(place, len(together))
        if len(self._stream) > self._begin:
            self._begin, self._characters = len(self._stream), 0
            self._decoder.reset()
        return place

    def _place(self, data: bytes) -> int:
        """The character that holds the first of these bytes, by the rules of UTF-8."""
        if not data:
            return self._characters
        self._characters += len(self._decoder.decode(data[:1]))
        is_open = bool(self._decoder.getstate()[0])
        place = self._characters - (not is_open)
        self._characters += len(self._decoder.decode(data[1:]))
        return place
