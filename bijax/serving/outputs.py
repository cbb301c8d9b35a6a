"""The outputs of a request."""

from dataclasses import dataclass, field
from typing import Literal

type FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token.

    Attributes:
        logprob: Of the token among the model's own logits, before penalties, temperature and filters. A float32:
            `numpy.float32(logprob)` has the bits that the device computed.
        token: The token.
        top: The most probable tokens with their log-probabilities, the most probable first, the lower token first
            among equals.
        sampled_logprob: Of the token in the sampled distribution, after penalties, temperature and filters; 0 at
            temperature 0. None for a token of the prompt.
    """

    logprob: float
    token: int
    top: tuple[tuple[float, int], ...] = ()
    sampled_logprob: float | None = None


@dataclass(frozen=True)
class Completion:
    """One output of a request, possibly partial.

    Attributes:
        index: Which of the request's `n` outputs this is.
        tokens: All tokens so far, a stop token that ended it included.
        text: Their text without stop strings and tokens; None without a tokenizer. While the output is not finished,
            what may become part of a stop string or of an incomplete character is held back.
        logprobs: One for each token, if the request wants them.
        finish_reason: None while it is not finished; "stop" at a stop string, a stop token or the end of the text,
            "length" at `max_new_tokens` or where model or cache have room for no more, "abort" if it was aborted.
        stop_reason: The stop string or token that ended it.
        seed: Of its random numbers: a request for one output with this seed gets the same output.
    """

    index: int
    tokens: tuple[int, ...]
    text: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The output of a request so far: outputs are cumulative.

    Attributes:
        request_id: Id of the request.
        prompt_tokens: The prompt.
        completions: The `n` outputs, by index.
        finished: Whether all of them are finished.
        prompt_logprobs: For the prompt's tokens from `logprob_start_len` on, None for the first token of the prompt;
            None if the request did not ask for them or the prompt is not computed yet.
        cached_tokens: Tokens of the prompt that came from the prefix cache.
        weight_version: Of the weights with which the last token was computed.
        embedding: Of the prompt, float32, if the request wants it: the hidden state after the last layer and norm
            at the last token.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    weight_version: str = "default"
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine.

    Attributes:
        num_running: Sequences that hold pages.
        num_waiting: Sequences that wait for pages or a place.
        kv_cache_usage: Fraction of the pages that sequences hold; pages that only the prefix cache keeps are free.
        prefix_queries: Tokens of prompts looked up in the prefix cache.
        prefix_hits: Those of them that were found.
        preemptions: Times that a sequence lost its pages and was computed again.
        compilations: Programs compiled by the engine's steps.
        prompt_tokens: Tokens of prompts computed or found.
        generated_tokens: Tokens sampled.
        drafted_tokens: Tokens proposed by prompt lookup.
        accepted_tokens: Proposed tokens that the model sampled too.
        finished: Requests finished, by reason.
        weight_version: Of the weights.
        cache_tokens: Tokens that the cache has room for.
        state_bytes: Memory of a running sequence's state, in bytes; 0 with a model that keeps pages alone.
        snapshot_bytes: Memory of a snapshot of a state.
        num_snapshots: Snapshots that fit in memory.
        snapshots_used: Those that hold a state.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    compilations: int
    prompt_tokens: int
    generated_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    weight_version: str = "default"
    cache_tokens: int = 0
    state_bytes: int = 0
    snapshot_bytes: int = 0
    num_snapshots: int = 0
    snapshots_used: int = 0
