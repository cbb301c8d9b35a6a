"""The text of tokens that come one after another, and where it stops."""

from collections.abc import Container, Sequence

from bijax.serving.model import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes tokens as they come.

    A token may be part of a character, and a tokenizer may join a token to the previous one, so the text of a window of
    tokens is compared with and without the new ones.

    Args:
        tokenizer: Decodes tokens.
        stop: Strings at which the text ends.
        left_out: Tokens that are not in the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], left_out: Container[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._left_out = left_out
        self._tokens: list[int] = []
        self._window = 0
        self._done = 0
        self._text = ""
        self._held = ""
        self._end: int | None = None

    def start_over(self, tokens: Sequence[int]) -> None:
        """Resets, and appends the text of these tokens."""
        self._tokens, self._window, self._done, self._text, self._end = [], 0, 0, "", None
        self._held = ""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Appends the text of a token, if it has any: models have more tokens than their tokenizers, for padding."""
        if token in self._left_out:
            return
        try:
            self._tokenizer.decode([token])
        except ValueError:
            return
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._window : self._done])
        after = self._tokenizer.decode(self._tokens[self._window :])
        self._held = after[len(before) :]
        if self._held and not self._held.endswith(_INCOMPLETE):
            self._append_held()

    def find_stop(self, longest_new: int) -> str | None:
        """Looks for stop strings among the last characters; returns the first one that ends the text.

        Args:
            longest_new: Number of characters at the end that are new since the last call.
        """
        best: tuple[int, str] | None = None
        for string in self._stop:
            place = self._text.find(string, max(0, len(self._text) - longest_new - len(string) + 1))
            if place >= 0 and (best is None or place < best[0]):
                best = (place, string)
        if best is None:
            return None
        self._end = best[0]
        return best[1]

    def finish(self) -> None:
        """Appends the incomplete character that was held back."""
        if self._end is None:
            self._append_held()

    def tail(self, start: int) -> str:
        """The text from a place on, including stop strings and any incomplete character held back."""
        return self._text[start:] + self._held

    def _append_held(self) -> None:
        self._text += self._held
        self._held = ""
        self._window, self._done = self._done, len(self._tokens)

    def __len__(self) -> int:
        return len(self._text)

    @property
    def whole(self) -> str:
        """The text up to a stop string."""
        return self._text if self._end is None else self._text[: self._end]

    @property
    def sure(self) -> str:
        """The same without an end that may become part of a stop string."""
        text = self.whole
        if self._end is not None:
            return text
        held = 0
        for string in self._stop:
            for length in range(min(len(string) - 1, len(text)), held, -1):
                if text.endswith(string[:length]):
                    held = length
                    break
        return text[: len(text) - held]
