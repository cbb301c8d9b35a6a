"""The sampling parameters of a request."""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bijax.serving.grammar import Grammar

MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_TOP_LOGPROBS = 20
_LEAST_NORMAL = 2.0**-126  # of float32
_SHOWN = 8  # tokens of a list in an error


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are sampled, and when they end. It checks itself.

    Filters apply in this order: penalties, logit bias and allowed tokens, temperature, top-k, top-p, min-p.

    Args:
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Keeps this many of the most probable tokens; None keeps all.
        top_p: Keeps each token if the more probable ones have a total probability below it; in (0, 1].
        min_p: Keeps tokens with at least this fraction of the largest probability; in [0, 1].
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens of the prompt and the
            output; above 0.
        frequency_penalty: Subtracted from a logit for each time that its token is in the output; in [-2, 2].
        presence_penalty: Subtracted from the logits of tokens that are in the output; in [-2, 2].
        logit_bias: Added to the logits of tokens; in [-100, 100].
        allowed_token_ids: The only tokens that may be sampled; None allows all.
        max_new_tokens: Maximum number of output tokens; 0 computes the prompt alone.
        min_new_tokens: Number of tokens before which neither a stop token nor the end of the text is sampled and stop
            strings are not looked for.
        stop: Strings at which the output ends; its text does not hold them.
        stop_token_ids: Tokens at which the output ends. They are the last of its tokens and not in its text.
        ignore_eos: Whether the end-of-text tokens of the model do not end the output.
        n: Number of outputs. Output i equals that of a single-output request with the seed `seed + i`, modulo 2**64.
        seed: Of the random numbers, -2**63 to 2**64 - 1, taken modulo 2**64; None for random ones, unless an option of
            the engine chooses them.
        logprobs: Whether the log-probabilities of the sampled tokens are returned.
        top_logprobs: Number of most probable tokens to return with each log-probability; 0 to 20.
        prompt_logprobs: Whether log-probabilities of the prompt's tokens are returned.
        logprob_start_len: First token of the prompt whose log-probability is returned.
        grammar: What the output must look like, see `Grammar`; it ends where the grammar allows no more. None for no
            constraint.
        embedding: Whether the embedding of the prompt is returned, for models that have embeddings; needs
            `max_new_tokens=0`.
        adapter: Name of the model's LoRA adapter that the output is computed with; None for the model itself.
        skip_special_tokens: Whether the text of the output leaves out the tokenizer's special tokens.

    Raises:
        TypeError: If a field has the wrong type; the message names the field.
        ValueError: If a field is out of range.

    Example:
        >>> SamplingParams(temperature=0.0, max_new_tokens=8).top_p
        1.0
        >>> SamplingParams(top_p=0.0)
        Traceback (most recent call last):
            ...
        ValueError: SamplingParams: top_p must be above 0 and at most 1, got 0.0.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    logprob_start_len: int = 0
    skip_special_tokens: bool = False
    grammar: Grammar | None = None
    embedding: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "logprobs", "prompt_logprobs", "skip_special_tokens", "embedding"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"SamplingParams: {name} must be True or False, got {getattr(self, name)!r}.")
        self._number("temperature", 0.0, math.inf, "at least 0")
        self._number("top_p", 0.0, 1.0, "above 0 and at most 1", above=True)
        self._number("min_p", 0.0, 1.0, "from 0 to 1")
        # Logits are divided by it in float32, where smaller numbers count as 0.
        self._number(
            "repetition_penalty", _LEAST_NORMAL, math.inf, "above 0 (at least 2**-126, about 1.18e-38, as a float32)"
        )
        for name in ("frequency_penalty", "presence_penalty"):
            self._number(name, -MAX_PENALTY, MAX_PENALTY, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
        for name in ("max_new_tokens", "min_new_tokens", "logprob_start_len"):
            self._integer(name, 0, None)
        self._integer("n", 1, None)
        self._integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
        if self.top_k is not None:
            self._integer("top_k", 1, None)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**64 - 1)
        if self.embedding and self.max_new_tokens:
            raise ValueError(
                f"SamplingParams: max_new_tokens must be 0 with embedding=True, got {self.max_new_tokens}."
            )
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise TypeError(f"SamplingParams: adapter must be a string or None, got {self.adapter!r}.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise TypeError(f"SamplingParams: grammar must be a Grammar, got {self.grammar!r}.")
        if self.grammar is not None and self.min_new_tokens:
            raise ValueError(
                f"SamplingParams: min_new_tokens must be 0 with a grammar, which says where the output ends, got"
                f" {self.min_new_tokens}."
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"SamplingParams: min_new_tokens must be at most max_new_tokens, got {self.min_new_tokens} and"
                f" {self.max_new_tokens}."
            )
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("SamplingParams: allowed_token_ids must name at least one token, got none.")
        self._set("logit_bias", _biases(self.logit_bias))

    @functools.cached_property
    def has_filters(self) -> bool:
        """Whether tokens are filtered by top-k, top-p or min-p."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @functools.cached_property
    def has_extras(self) -> bool:
        """Whether logits are changed by penalties, biases or bans, apart from `min_new_tokens`."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or self.grammar is not None
        )

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether seed and temperature are all that tokens are sampled with, and tokens all that is returned."""
        return not (self.has_filters or self.has_extras or self.min_new_tokens or self.logprobs)

    def check_tokens(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Checks that the tokens named are in a vocabulary, and that there is a token to sample at every step.

        Args:
            vocab_size: Number of tokens.
            eos_token_ids: Those that end the text.

        Raises:
            ValueError: If a token is not in the vocabulary, or none may be sampled before `min_new_tokens`; the message
                names the field.

        Example:
            >>> SamplingParams(allowed_token_ids=(2,), min_new_tokens=3).check_tokens(8, eos_token_ids=[2])
            Traceback (most recent call last):
                ...
            ValueError: SamplingParams: allowed_token_ids must name a token that may come before min_new_tokens, got ...
        """
        named = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in named.items():
            outside = [token for token in tokens if token >= vocab_size]
            if outside:
                raise ValueError(
                    f"SamplingParams: {name} must name tokens from 0 to {vocab_size - 1}, got {outside[0]}."
                )

        if self.min_new_tokens:
            self._check_start(
                vocab_size, frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)
            )

    def _check_start(self, vocab_size: int, ends: frozenset[int]) -> None:
        if self.allowed_token_ids is None:
            if len([token for token in ends if 0 <= token < vocab_size]) == vocab_size:
                raise ValueError(
                    "SamplingParams: stop_token_ids must leave a token that may come before min_new_tokens, got all"
                    f" {vocab_size} tokens. Leave one out, or set min_new_tokens to 0."
                )
        elif ends.issuperset(self.allowed_token_ids):
            shown = ", ".join(map(str, self.allowed_token_ids[:_SHOWN])) + ", ..." * (
                len(self.allowed_token_ids) > _SHOWN
            )
            raise ValueError(
                "SamplingParams: allowed_token_ids must name a token that may come before min_new_tokens, got only"
                f" tokens that end the output: {shown}. Allow others too, or set min_new_tokens to 0."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _number(self, name: str, low: float, high: float, wanted: str, *, above: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"SamplingParams: {name} must be a number, got {value!r}.")
        try:
            number = float(value)
        except OverflowError:  # an integer; shown short, since Python refuses to print thousands of digits
            raise ValueError(
                f"SamplingParams: {name} must be {wanted}, got an integer too large for a float."
            ) from None
        if not math.isfinite(number) or not low <= number <= high or (above and number == low):
            raise ValueError(f"SamplingParams: {name} must be {wanted}, got {value!r}.")
        self._set(name, number)

    def _integer(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"SamplingParams: {name} must be an integer, got {value!r}.")
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"SamplingParams: {name} must be {wanted}, got {value}.")


def _strings(given: Any) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"SamplingParams: stop must be a string or several, got {given!r}.")
    if not all(strings):
        raise ValueError("SamplingParams: stop must hold strings of at least one character, got an empty one.")
    return tuple(strings)


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or not all(map(_is_integer, given)):
        raise TypeError(f"SamplingParams: {name} must be a sequence of integers, got {given!r}.")
    negative = [token for token in given if token < 0]
    if negative:
        raise ValueError(f"SamplingParams: {name} must not be negative, got {negative[0]}.")
    return tuple(given)


def _biases(given: Any) -> Mapping[int, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"SamplingParams: logit_bias must map tokens to numbers, got {given!r}.")
    _token_ids("logit_bias", list(given))
    for token, bias in given.items():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise TypeError(f"SamplingParams: logit_bias must map tokens to numbers, got {bias!r} for token {token}.")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # nan too
            raise ValueError(
                f"SamplingParams: logit_bias must be from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {bias!r} for"
                f" token {token}."
            )
    return {token: float(bias) for token, bias in given.items()}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
