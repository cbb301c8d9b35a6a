"""Requests and their sequences while the engine works on them."""

import functools
import hashlib
import secrets
from dataclasses import dataclass, field

import numpy as np

from bijax.serving.grammar import Matcher
from bijax.serving.outputs import Completion, FinishReason, RequestOutput, TokenLogprob
from bijax.serving.params import SamplingParams
from bijax.serving.snapshot import Snapshot
from bijax.serving.text import TextStream
from bijax.serving.tokens import Tokens

type Key = tuple[int, int, int]
"""The scheduling order: the smaller key comes first."""


@dataclass(eq=False)
class Sequence:
    """One output of a request.

    Attributes:
        request: The request.
        index: Which of its outputs this is.
        seed: Of its random numbers, from 0 to 2**64 - 1.
        tokens: Prompt and output.
        stop_tokens: Tokens that end it.
        text: Its text; None without a tokenizer.
        least: Number of tokens, prompt included, before which nothing stops it.
        most: Maximum number of tokens.
        matcher: Its state in its grammar; None without one.
        computed: Number of tokens whose keys and values are in the pages, once the device has finished its work.
        in_flight: Dispatched steps that are not read yet.
        unread: Tokens that these steps sample.
        pages: The pages.
        slot: Where the device stores its last token; -1 while it has no pages.
        written: Number of pages in the page table of its slot.
        inserted: Number of pages inserted in the prefix cache.
        preempted: Whether it has ever lost its pages.
        snapshot: The last snapshot of its state, which it holds; None without one.
        drafts: What the model's head drafts after its tokens.
        logprobs: Of the output.
        finish_reason: See `Completion`.
        stop_reason: See `Completion`.
    """

    request: "Request"
    index: int
    seed: int
    tokens: Tokens
    stop_tokens: frozenset[int]
    text: TextStream | None
    least: int
    most: int
    matcher: Matcher | None = None
    computed: int = 0
    in_flight: int = 0
    unread: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    written: int = 0
    inserted: int = 0
    preempted: bool = False
    snapshot: Snapshot | None = None
    drafts: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @functools.cached_property
    def key(self) -> Key:
        """Its place in the order of all sequences."""
        return (*self.request.key, self.index)

    @property
    def output(self) -> Tokens:
        """The tokens sampled so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def missing(self) -> int:
        """Number of tokens that must be computed before the next one can be sampled."""
        return len(self.tokens) + self.unread - self.computed

    @functools.cached_property
    def counts(self) -> "np.ndarray":
        """(V,) int32, how often each token is in the output. Made when a penalty needs it."""
        return np.bincount(self.output, minlength=self.request.vocab_size).astype(np.int32)

    def append(self, token: int, logprob: TokenLogprob | None) -> None:
        """Appends a token, and checks whether it ends the sequence.

        Args:
            token: The token.
            logprob: Its log-probability, if the request wants it.
        """
        self.tokens.append(token)
        if "counts" in self.__dict__:
            self.counts[token] += 1
        if logprob is not None:
            self.logprobs.append(logprob)
        fits = self.matcher is None or self.matcher.append(token)
        may_stop = len(self.tokens) >= self.least
        if token in self.stop_tokens and may_stop:
            self.finish("stop", token)
            return
        if not fits:
            self.finish("abort", "the grammar does not allow a token that was sampled; this is a bug in bijax")
            return
        if self.text is not None:
            before = len(self.text)
            self.text.add(token)
            found = self.text.find_stop(len(self.text) - before) if may_stop else None
            if found is not None:
                self.finish("stop", found)
                return
        if self.matcher is not None and self.matcher.finished:
            self.finish("stop")
        elif len(self.tokens) >= self.most:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends the sequence."""
        if self.text is not None:
            self.text.finish()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def start_over(self) -> None:
        """Resets to where nothing is computed, and drops the last token, which may be half applied.

        Recomputed values have the same bits.
        """
        self.computed = self.in_flight = self.unread = self.written = self.inserted = 0
        self.pages, self.slot, self.preempted, self.snapshot, self.drafts = [], -1, True, None, []
        self.finish_reason = self.stop_reason = None
        del self.tokens[max(len(self.request.prompt), len(self.tokens) - 1) :]
        del self.logprobs[len(self.output) :]
        self.__dict__.pop("counts", None)
        if self.text is not None:
            self.text.start_over(self.output)
        if self.matcher is not None:
            self.matcher.start_over(self.output)

    def completion(self) -> Completion:
        """Returns its output so far."""
        text = None
        if self.text is not None:
            text = self.text.sure if self.finish_reason is None else self.text.whole
        return Completion(
            self.index, tuple(self.output), text, tuple(self.logprobs), self.finish_reason, self.stop_reason, self.seed
        )


@dataclass(eq=False)
class Request:
    """A request.

    Attributes:
        id: Its name.
        prompt: Tokens.
        params: Its sampling parameters.
        key: Its place in the order of all requests.
        vocab_size: The model's.
        adapter: 0 for the model itself, i + 1 for its adapter i.
        sequences: Its outputs.
        prompt_logprobs: The available ones, from `logprob_start_len` on.
        scored: Tokens of the prompt before this one have log-probabilities, or were dispatched to be computed.
        cached_tokens: Tokens of the prompt that came from the prefix cache.
        weight_version: Of the weights with which the last token was computed.
        embedding: Of the prompt, once it is computed, if requested.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    key: tuple[int, int]
    vocab_size: int
    adapter: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    scored: int = 0
    cached_tokens: int = 0
    weight_version: str = "default"
    embedding: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self.scored = self.params.logprob_start_len
        if self.params.prompt_logprobs and self.scored == 0:
            self.prompt_logprobs.append(None)
            self.scored = 1

    @property
    def next_prompt_logprob(self) -> int | None:
        """The first token of the prompt whose log-probability is still to be computed, or None."""
        return self.scored if self.params.prompt_logprobs and self.scored < len(self.prompt) else None

    @property
    def finished(self) -> bool:
        """Whether all outputs are finished."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def start_over(self) -> None:
        """Resets to the host's state after steps that did not finish."""
        self.scored = self.params.logprob_start_len + len(self.prompt_logprobs)
        all_of_them = self.finished  # and the caller has not been notified
        for sequence in self.sequences:
            if all_of_them or sequence.finish_reason is None:
                sequence.start_over()

    @functools.cached_property
    def in_prompt(self) -> "np.ndarray":
        """(V,) bool, tokens of the prompt."""
        return np.bincount(self.prompt, minlength=self.vocab_size) > 0

    @functools.cached_property
    def bias(self) -> "np.ndarray":
        """(V,) float32, the logit bias."""
        bias = np.zeros(self.vocab_size, np.float32)
        bias[list(self.params.logit_bias)] = list(self.params.logit_bias.values())
        return bias

    @functools.cached_property
    def allowed(self) -> "np.ndarray":
        """(V,) bool, tokens that may be sampled."""
        chosen = self.params.allowed_token_ids
        allowed = np.full(self.vocab_size, chosen is None)
        allowed[list(chosen or ())] = True
        return allowed

    def output(self) -> RequestOutput:
        """Returns its output so far."""
        logprobs = None
        wanted = max(0, len(self.prompt) - self.params.logprob_start_len)
        if self.params.prompt_logprobs and len(self.prompt_logprobs) == wanted:
            logprobs = tuple(self.prompt_logprobs)
        return RequestOutput(
            self.id,
            self.prompt,
            tuple(sequence.completion() for sequence in self.sequences),
            self.finished,
            logprobs,
            self.cached_tokens,
            self.weight_version,
            self.embedding,
        )


def random_seed() -> int:
    """Returns a random seed for a request without one, of 48 bits, so that JSON readers keep it exact."""
    return secrets.randbits(48)


def seed_of(prompt: Tokens) -> int:
    """Returns a hash of a prompt, as the seed of a request without one: equal requests then sample equal tokens.

    Example:
        >>> from bijax.serving.tokens import as_tokens
        >>> prompt, same, other = map(as_tokens, ((1, 2), (1, 2), (1, 3)))
        >>> seed_of(prompt) == seed_of(same), seed_of(prompt) == seed_of(other)
        (True, False)
    """
    digest = hashlib.blake2b(np.asarray(prompt, "<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
