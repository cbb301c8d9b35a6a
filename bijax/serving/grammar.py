"""Grammars that outputs follow, and the tokens that they allow next. The library llguidance computes the masks."""

import functools
import importlib.util
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from bijax.serving.model import Tokenizer

if TYPE_CHECKING:
    import llguidance

INSTALL: Final = "run `pip install llguidance`"
_KEPT: Final = 64  # compiled grammars
_SEPARATORS: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """What an output must look like.

    Attributes:
        kind: "json_schema" (JSON that satisfies a schema, written as Python's `json.dumps` writes it), "regex" (in the
            syntax of Rust's crate regex, for the whole output), "ebnf" (GBNF, as of llama.cpp, or Lark), "lark" (Lark
            with the extensions of llguidance).
        source: The schema as JSON, the expression, or the grammar.

    Example:
        >>> Grammar.choice(["yes", "no"])
        Grammar(kind='regex', source='yes|no')
        >>> Grammar.json({"type": "integer"}).source
        '{"type": "integer"}'
    """

    kind: Literal["json_schema", "regex", "ebnf", "lark"]
    source: str

    @classmethod
    def json(cls, schema: Any = None) -> "Grammar":
        """Returns the grammar of a JSON schema; of any object by default."""
        return cls("json_schema", json.dumps({"type": "object"} if schema is None else schema))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> "Grammar":
        """Returns the grammar of a choice of texts."""
        return cls("regex", "|".join(map(_escaped, texts)))


class Grammars:
    """Compiles grammars for a vocabulary.

    Args:
        tokenizer: Its tokens; None has none, and refuses all grammars.
        vocab_size: Number of tokens of the model.
        eos_token_ids: Tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        # A schema with thousands of properties takes seconds, in which the engine makes no step.
        self._initial = functools.lru_cache(maxsize=_KEPT)(self._compile)

    @property
    def available(self) -> bool:
        """Whether the tokenizer supports grammars, and the library is installed."""
        return hasattr(self._tokenizer, "token_bytes") and bool(self._ends) and _is_installed()

    def prepare(self) -> None:
        """Reads the vocabulary, which takes seconds, if grammars are available."""
        if self.available:
            _ = self._vocabulary

    def matcher(self, grammar: Grammar) -> "Matcher":
        """Returns the state of an output that is empty.

        Raises:
            ValueError: If the grammar is invalid, the library is missing, or the tokenizer does not support grammars.
        """
        if not _is_installed():
            raise ValueError(
                f"SamplingParams: grammar needs the package llguidance, which is not installed; {INSTALL}."
            )
        if not self.available:
            raise ValueError(
                "SamplingParams: grammar needs an engine with a tokenizer that has the method token_bytes, and"
                " end-of-text tokens in the vocabulary."
            )
        return self._initial(grammar).copy()

    def _compile(self, grammar: Grammar) -> "Matcher":
        """Returns a matcher that stays at the start: requests get copies."""
        from llguidance import LLMatcher

        inner = LLMatcher(self._vocabulary, _compiled(grammar))
        if problem := inner.get_error():
            raise ValueError(f"SamplingParams: grammar must be a valid {grammar.kind}: {problem.strip()}")
        return Matcher(inner, self._vocab_size, self._ends)

    @functools.cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self._tokenizer, self._vocab_size, self._ends)), self._vocab_size)


class Matcher:
    """The state of one output in its grammar.

    Args:
        inner: llguidance's.
        vocab_size: Number of tokens.
        ends: Tokens that end a text; the first is the one that llguidance uses.
    """

    def __init__(self, inner: "llguidance.LLMatcher", vocab_size: int, ends: Sequence[int]) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._words = np.zeros((1, -(-vocab_size // 32)), np.int32)

    def copy(self) -> "Matcher":
        """Returns an independent copy of the state."""
        return Matcher(self._inner.deep_copy(), self._vocab_size, self._ends)

    @property
    def finished(self) -> bool:
        """Whether the grammar allows nothing more, apart from the end of the text."""
        return self._inner.is_stopped()

    def append(self, token: int) -> bool:
        """Takes the next token; returns whether the grammar allows it."""
        return self._inner.consume_token(self._ends[0] if token in self._ends else token)

    def allowed(self, tokens: Sequence[int]) -> int:
        """Returns how many of these tokens, from the first on, may come next."""
        return self._inner.validate_tokens(list(tokens))

    def mask(self, tokens: Sequence[int] = ()) -> np.ndarray:
        """Returns which tokens may come after these, (V,) bool. The state stays.

        Args:
            tokens: Tokens that the grammar allows.
        """
        taken = self._inner.try_consume_tokens(list(tokens)) if tokens else 0
        self._inner.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if taken:
            self._inner.rollback(taken)
        mask = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)
        mask[self._ends] = mask[self._ends[0]]
        return mask

    def start_over(self, tokens: Iterable[int]) -> None:
        """Resets the state to the start, and appends these tokens."""
        self._inner.reset()
        for token in tokens:
            self.append(token)


class _Tokens:
    """A vocabulary as llguidance reads it."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.special_token_ids = sorted({*getattr(tokenizer, "special_token_ids", ()), *ends})
        self._tokenizer = tokenizer
        self.tokens = [self._bytes(token) for token in range(vocab_size)]

    def _bytes(self, token: int) -> bytes:
        try:
            return bytes(self._tokenizer.token_bytes(token))
        except ValueError:  # vocabularies are padded with unused tokens
            return b""

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text. llguidance asks for them to look ahead; any will do, and masks do not depend on them."""
        by_bytes = self.__dict__.setdefault("_by_bytes", {data: token for token, data in enumerate(self.tokens)})
        return [by_bytes[text[i : i + 1]] for i in range(len(text)) if text[i : i + 1] in by_bytes]


def _is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def _compiled(grammar: Grammar) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        match grammar.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(grammar.source, _SEPARATORS)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.source)
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.source)
            case "ebnf":
                return LLMatcher.grammar_from_lark(any_to_lark(grammar.source))
    except Exception as error:  # of its parsers, which have no common base
        raise ValueError(f"SamplingParams: grammar must be a valid {grammar.kind}: {error}") from error


def _escaped(text: str) -> str:
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
