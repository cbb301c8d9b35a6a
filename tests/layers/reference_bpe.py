"""A slow byte-level BPE, written from the published description alone, to compare the fast one with."""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from tests.layers.checkpoint_files import byte_symbols

# Unicode's White_Space, which is what \s means in the published patterns (str.isspace also takes U+001C to U+001F).
SPACES = {
    *map(chr, [*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000])
}

Cut = Callable[[str], list[str]]


def kind(char: str) -> str:
    """'L' for a letter, 'N' for a number, 'S' for white space, 'O' for the rest."""
    if char in SPACES:
        return "S"
    category = unicodedata.category(char)[0]
    return category if category in "LN" else "O"


def _run(text: str, start: int, wanted: str) -> int:
    """The end of the run of characters of one kind that starts at `start`."""
    end = start
    while end < len(text) and kind(text[end]) == wanted:
        end += 1
    return end


def _space_end(text: str, start: int) -> int:
    r"""The end of `\s+(?!\S)|\s+`: a run of spaces leaves its last one to the next word, unless it is the only one."""
    end = _run(text, start, "S")
    return end - 1 if end < len(text) and end - start > 1 else end


def gpt2_words(text: str) -> list[str]:
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ ."""
    words, i = [], 0
    while i < len(text):
        contraction = re.match(r"'(?:s|t|re|ve|m|ll|d)", text[i:])
        first = i + (text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != "S")
        if contraction:
            end = i + contraction.end()
        elif kind(text[first]) != "S":
            end = _run(text, first, kind(text[first]))
        else:
            end = _space_end(text, i)
        words.append(text[i:end])
        i = end
    return words


def smollm_words(text: str) -> list[str]:
    """Every digit alone, then GPT-2's words between the digits."""
    words: list[str] = []
    between = ""
    for char in text:
        if kind(char) == "N":
            words += [*gpt2_words(between), char]
            between = ""
        else:
            between += char
    return words + gpt2_words(between)


def llama3_words(text: str, digits: int = 3) -> list[str]:
    r"""Llama 3's pattern, `digits` being the longest run of digits.

    (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
    """
    words, i = [], 0
    while i < len(text):
        contraction = re.match(r"'(?:s|t|re|ve|m|ll|d)", text[i : i + 3], re.IGNORECASE)
        leads = text[i] not in "\r\n" and kind(text[i]) in "SO" and i + 1 < len(text)
        first = i + (text[i] == " " and i + 1 < len(text))
        if contraction:
            end = i + contraction.end()
        elif kind(text[i]) == "L":
            end = _run(text, i, "L")
        elif leads and kind(text[i + 1]) == "L":
            end = _run(text, i + 1, "L")
        elif kind(text[i]) == "N":
            end = min(_run(text, i, "N"), i + digits)
        elif kind(text[first]) == "O":
            end = _run(text, first, "O")
            while end < len(text) and text[end] in "\r\n":
                end += 1
        else:
            spaces = text[i : _run(text, i, "S")]
            newline = max(spaces.rfind("\n"), spaces.rfind("\r"))
            end = i + newline + 1 if newline >= 0 else _space_end(text, i)
        words.append(text[i:end])
        i = end
    return words


def qwen2_words(text: str) -> list[str]:
    """Llama 3's words with every digit alone."""
    return llama3_words(text, digits=1)


class ReferenceBPE:
    """Byte-level BPE: cut out special tokens, cut into words, then join the pair of lowest rank until none is left."""

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[tuple[str, str]], specials: Sequence[str], cut: Cut
    ) -> None:
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {merge: rank for rank, merge in enumerate(merges)}
        self.specials = re.compile("|".join(re.escape(special) for special in sorted(specials, key=len, reverse=True)))
        self.cut = cut
        self.symbols = byte_symbols()

    def encode(self, text: str) -> list[int]:
        ids, start = [], 0
        for special in self.specials.finditer(text):
            ids += [*self._encode_plain(text[start : special.start()]), self.ids[special[0]]]
            start = special.end()
        return [*ids, *self._encode_plain(text[start:])]

    def _encode_plain(self, text: str) -> Iterator[int]:
        for word in self.cut(text):
            parts = [self.symbols[byte] for byte in word.encode()]
            while True:
                pairs = [self.ranks.get(pair, len(self.ranks)) for pair in itertools.pairwise(parts)]
                if not pairs or min(pairs) == len(self.ranks):
                    break
                best = pairs.index(min(pairs))
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            yield from (self.ids[part] for part in parts)
