"""What the engine returns is what `sample` makes of the model's logits, called for each token by hand."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import bijax
from bijax.sampling import sample, seed_words
from bijax.serving import SamplingParams
from tests.serving.traffic import LONGEST, PARAMS, SMALL, VOCABULARY, engine, model, random_requests

WITH_LOGPROBS = [p | {"logprobs": True, "n": 1} for p in PARAMS]


_sample = jax.jit(functools.partial(sample, num_top=0))


def logits_of(tokens: list[int]) -> np.ndarray:
    """Returns the logits after each token, (T, V), from the model alone, in calls of the engine's shape."""
    size, page, pages = (SMALL[name] for name in ("max_prefill_tokens", "page_size", "num_pages"))
    table = np.arange(LONGEST // page, dtype=np.int32)[None]
    held, found = model().init_pages(pages, page), []
    for start in range(0, len(tokens), size):
        part = np.zeros((1, size), np.int32)
        used = len(tokens[start : start + size])
        part[0, :used] = tokens[start : start + size]
        hidden, held = model().extend(held, part, table, np.array([start], np.int32), np.array([used], np.int32))
        found.append(np.asarray(model().logits(hidden[0]))[:used])
    return np.concatenate(found)


@functools.cache
def requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    found = random_requests(len(WITH_LOGPROBS), seed=8)
    return [
        (prompt, SamplingParams(**({"max_new_tokens": 8, "seed": index} | WITH_LOGPROBS[index])))
        for index, (prompt, _) in enumerate(found)
    ]


@functools.cache
def outputs() -> list[Any]:
    # The programs of other tests: those of test_traffic.py compare speculation with none.
    return engine(speculative_tokens=0).generate(*zip(*requests(), strict=True))


@pytest.mark.tier("full", fast=("4", "7"))
@pytest.mark.parametrize("index", range(len(WITH_LOGPROBS)))
def test_tokens_are_sampled_from_the_models_logits(index: int) -> None:
    (prompt, params), output = requests()[index], outputs()[index]
    [completion] = output.completions
    tokens = list(prompt + completion.tokens)
    logits = logits_of(tokens)
    start = len(prompt)
    rows = slice(start - 1, len(tokens) - 1)
    number = len(completion.tokens)
    in_prompt = np.bincount(prompt, minlength=VOCABULARY) > 0
    counts = [np.bincount(tokens[start : start + i], minlength=VOCABULARY) for i in range(number)]
    bias = np.zeros(VOCABULARY, np.float32)
    for token, value in params.logit_bias.items():
        bias[token] = value
    allowed = np.full((number, VOCABULARY), params.allowed_token_ids is None)
    allowed[:, list(params.allowed_token_ids or ())] = True
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {3})
    allowed[: params.min_new_tokens, sorted(ends)] = False
    # 24 rows always, so that everything is one program.
    wide = {
        name: np.concatenate([a, np.repeat(a[:1], 24 - number, 0)])
        for name, a in {
            "logits": logits[rows],
            "positions": np.arange(start, len(tokens)),
            "output_counts": np.stack(counts),
            "allowed": allowed,
        }.items()
    }
    found = _sample(
        **wide,
        seeds=seed_words([params.seed or 0] * 24),
        temperature=np.float32(params.temperature),
        top_k=np.int32(params.top_k or 0),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition_penalty=np.float32(params.repetition_penalty),
        frequency_penalty=np.float32(params.frequency_penalty),
        presence_penalty=np.float32(params.presence_penalty),
        prompt_mask=np.tile(in_prompt, (24, 1)),
        logit_bias=np.tile(bias, (24, 1)),
    )
    assert found.tokens[:number].tolist() == list(completion.tokens)
    assert found.logprobs[:number].tolist() == [p.logprob for p in completion.logprobs]
    assert found.sampled_logprobs[:number].tolist() == [p.sampled_logprob for p in completion.logprobs]
    if params.prompt_logprobs and output.prompt_logprobs is not None:
        logprobs = np.asarray(bijax.log_softmax(logits))
        scored = [p.logprob for p in output.prompt_logprobs if p is not None]
        first = start - len(scored)
        assert scored == [float(logprobs[i - 1, tokens[i]]) for i in range(first, start)]


def test_the_outputs_differ_as_their_parameters_do() -> None:
    """Seeds, temperatures and filters reach the device: no two requests for one prompt get the same."""
    prompt = requests()[0][0]
    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, **more)
        for more in ({"seed": 1}, {"seed": 2}, {"seed": 2**32 + 1}, {"seed": 1, "temperature": 0.0})
    ]
    found = [o.completions[0].tokens for o in engine(speculative_tokens=0).generate([prompt] * 4, params)]
    assert len(set(found)) == 4
