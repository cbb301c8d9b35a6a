"""Random requests, each one's own run alone, and comparisons of bits."""

import dataclasses
import functools
from typing import Any

import numpy as np

from bijax.serving import Completion, Engine, EngineOptions, RequestOutput, SamplingParams, TokenLogprob
from bijax.serving.toy import ToyModel

VOCABULARY = 160
LONGEST = 68
SMALL: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 18,
    "max_running": 2,
    "max_prefill_tokens": 16,
    "speculative_tokens": 3,
    "seed_from_prompt": True,
}
"""Few sizes, so few programs; few pages, so that requests preempt one another."""


@functools.cache
def model() -> ToyModel:
    # The heads of the other tests of the engine, so that tiles of attention are compared once.
    return ToyModel.random(seed=0, vocab_size=VOCABULARY, width=32, max_length=LONGEST)


class Letters:
    """A tokenizer: each token is two characters; from 150 on tokens have no text."""

    def decode(self, tokens: list[int]) -> str:
        if any(token >= 150 for token in tokens):
            raise ValueError("no such token")
        return "".join(chr(97 + token % 13) + chr(110 + token // 13) for token in tokens)


def engine(*, one_program: bool = False, **options: Any) -> Engine:
    served = dataclasses.replace(model(), one_program=one_program)
    return Engine(served, tokenizer=Letters(), eos_token_ids=(3,), options=EngineOptions(**(SMALL | options)))


@functools.cache
def _alone() -> Engine:
    return engine(prefix_cache=False, speculative_tokens=0)


def alone(prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    """Returns what a request gets from an engine that computes nothing else."""
    [output] = _alone().generate([prompt], params)
    return output


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    {"logprobs": True},
    {"temperature": 0.8, "top_k": 20, "logprobs": True},
    {"top_p": 0.8, "min_p": 0.01, "logprobs": True, "seed": 2**63 + 5},
    {"temperature": 0.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "logprobs": True},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 2.5}, "logprobs": True},
    {"allowed_token_ids": (3, 4, 5, 6, 7, 8), "min_new_tokens": 4, "logprobs": True},
    {"n": 3, "seed": 11, "logprobs": True},
    {"prompt_logprobs": True, "top_logprobs": 2, "logprobs": True},
    {"prompt_logprobs": True, "logprob_start_len": 5, "temperature": 0.0},
    {"stop": ("an", "bobo"), "logprobs": True},
    {"stop_token_ids": tuple(range(20, 40)), "ignore_eos": True},
]


def random_requests(number: int, seed: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Returns requests whose prompts have starts in common."""
    rng = np.random.default_rng(seed)
    starts = [tuple(rng.integers(0, VOCABULARY, n).tolist()) for n in (0, 4, 9, 17)]
    requests = []
    for index in range(number):
        start = starts[rng.integers(len(starts))]
        prompt = start + tuple(rng.integers(0, VOCABULARY, rng.integers(1, 24)).tolist())
        if rng.random() < 0.3:
            prompt = (prompt * 3)[:40]  # something to look up drafts in
        params = {"max_new_tokens": int(rng.integers(5, 24)), "seed": index} | PARAMS[index % len(PARAMS)]
        requests.append((prompt, SamplingParams(**params)))
    return requests


def bits(output: RequestOutput) -> Any:
    """Returns everything about an output that must not depend on other requests."""
    return (
        output.prompt_tokens,
        [_completion(c) for c in output.completions],
        None if output.prompt_logprobs is None else [p and _logprob(p) for p in output.prompt_logprobs],
    )


def _completion(c: Completion) -> Any:
    return c.index, c.tokens, c.text, c.finish_reason, c.stop_reason, [_logprob(p) for p in c.logprobs]


def _logprob(p: TokenLogprob) -> Any:
    sampled = None if p.sampled_logprob is None else _bits(p.sampled_logprob)
    return _bits(p.logprob), p.token, [(_bits(x), token) for x, token in p.top], sampled


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def all_pages_are_back(engine: Engine) -> bool:
    """Whether only the prefix cache holds pages."""
    stats = engine.stats()
    engine.flush_cache()
    return stats.kv_cache_usage == 0 and engine._scheduler.pool.free == engine.options.num_pages
