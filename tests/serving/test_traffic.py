"""Each request gets the bits of its own run alone, whatever the traffic."""

import collections
import dataclasses
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src.monitoring import unregister_event_duration_listener

from bijax.serving import DisaggregatedEngine, Engine, EngineOptions, RequestOutput, SamplingParams
from bijax.serving.toy import ToyModel
from tests.serving.traffic import (
    LONGEST,
    SMALL,
    VOCABULARY,
    Letters,
    all_pages_are_back,
    alone,
    bits,
    engine,
    model,
    random_requests,
)
from tests.tiers import full_only, tiered

WAYS: dict[str, dict[str, Any]] = {
    "speculation, and pages run out": {},
    "no prefix cache": {"prefix_cache": False},
    "no speculation": {"speculative_tokens": 0, "one_program": True},
    "wide": {"max_running": 8, "num_pages": 64, "max_prefill_tokens": 64},
}


@pytest.mark.parametrize("number", [26, full_only(400)])
@pytest.mark.parametrize("way", tiered(WAYS, fast=["speculation, and pages run out", "no speculation"]))
def test_random_traffic(way: str, number: int) -> None:
    """Requests come and go in random order, with priorities; some are aborted."""
    rng = np.random.default_rng(number)
    served = engine(**WAYS[way])
    requests = random_requests(number, seed=number)
    order = rng.permutation(number).tolist()
    aborted: set[str] = set()
    done: dict[str, RequestOutput] = {}
    cumulative: dict[str, int] = collections.defaultdict(int)
    while order or served.has_work:
        for _ in range(min(len(order), int(rng.integers(0, 4)))):
            index = order.pop()
            served.add(*requests[index], request_id=str(index), priority=int(rng.integers(-2, 3)))
        for output in served.step():
            tokens = sum(len(c.tokens) for c in output.completions)
            assert tokens >= cumulative[output.request_id]
            cumulative[output.request_id] = tokens
            if output.finished:
                done[output.request_id] = output
        if rng.random() < 0.05 and served._requests:
            victim = str(rng.choice(list(served._requests)))
            ended = served.abort(victim)
            assert ended is not None
            assert ended.finished
            aborted.add(victim)
    assert len(done) + len(aborted) == number
    for name, output in done.items():
        assert bits(output) == bits(alone(*requests[int(name)])), name
    assert all_pages_are_back(served)
    stats = served.stats()
    if way == "speculation, and pages run out":
        assert stats.preemptions > 0
        assert 0 < stats.prefix_hits < stats.prefix_queries
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
    if way == "no speculation":  # then a step is dispatched before the last one is read
        assert stats.preemptions > 0


@pytest.mark.parametrize("invariant", [True, False])
def test_log_probabilities_of_decoding_are_those_of_a_prompt(invariant: bool) -> None:
    """With bijax: the control shows that with JAX's own operations they are not."""
    served = engine(enable_deterministic_inference=invariant, speculative_tokens=0)
    prompt = tuple(range(30, 45))
    [decoded] = served.generate([prompt], SamplingParams(max_new_tokens=20, logprobs=True, ignore_eos=True))
    [completion] = decoded.completions
    served.flush_cache()
    again = SamplingParams(max_new_tokens=0, prompt_logprobs=True, logprob_start_len=len(prompt))
    [scored] = served.generate([prompt + completion.tokens], again)
    assert scored.prompt_logprobs is not None
    assert [p and p.token for p in scored.prompt_logprobs] == list(completion.tokens)
    same = [p and p.logprob for p in scored.prompt_logprobs] == [p.logprob for p in completion.logprobs]
    assert same == invariant


@pytest.mark.tier("full")
@pytest.mark.parametrize("one_program", [True, full_only(False)])
def test_nothing_compiles_after_the_warm_up(one_program: bool) -> None:
    # Bound to a device, as a trainer's weights are.
    weights = jax.device_put(dataclasses.replace(model(), one_program=one_program), jax.devices()[0])
    served = Engine(weights, tokenizer=Letters(), eos_token_ids=(3,), options=EngineOptions(**SMALL))
    progress: list[tuple[int, int]] = []
    served.warm_up(lambda done, total: progress.append((done, total)))
    assert progress == [(done, 5) for done in range(6)]
    known = served.stats().compilations
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        served.generate(*zip(*random_requests(26, seed=3), strict=True))
        assert not compiled
        jax.jit(lambda x: x * 3)(np.ones(3))
        assert compiled  # the listener hears compilations
    finally:
        unregister_event_duration_listener(listen)
    assert served.stats().compilations == known


def test_weights_change_between_steps() -> None:
    """What comes after an update has the bits of a new engine with the new weights; pages hold nothing old."""
    prompt, params = random_requests(3, seed=5)[2]
    served = engine()
    before = served.generate([prompt], params)[0]
    other = ToyModel.random(seed=9, vocab_size=VOCABULARY, width=32, max_length=LONGEST)
    served.update_weights(other.weights, version="nine")
    after = served.generate([prompt], params)[0]
    assert (before.weight_version, after.weight_version, after.cached_tokens) == ("default", "nine", 0)
    assert bits(after) != bits(before)
    served.update_weights(model())
    assert bits(served.generate([prompt], params)[0]) == bits(before) == bits(alone(prompt, params))
    with pytest.raises(TypeError, match="ToyModel: weights must be"):
        served.update_weights(3)


def test_two_engines_take_weights_or_leave_them() -> None:
    """Weights that the second engine refuses leave the first one with the old ones; both count the same versions."""
    prefill, decode = engine(), engine()
    decode.update_weights(model(), "default")
    both = DisaggregatedEngine(prefill=prefill, decode=decode)
    with (
        mock.patch.object(ToyModel, "with_weights", side_effect=[model(), ValueError("other shapes")]),
        pytest.raises(ValueError, match="other shapes"),
    ):
        both.update_weights(model())
    assert prefill.weight_version == decode.weight_version == "default"
    both.update_weights(model())
    assert prefill.weight_version == decode.weight_version
    assert both.hand_over([1, 2, 3]) == 0


def test_samples_of_one_prompt_are_those_of_their_seeds() -> None:
    prompt, _ = random_requests(1, seed=6)[0]
    params = SamplingParams(max_new_tokens=6, seed=2**64 - 2, n=3, logprobs=True)
    [output] = engine().generate([prompt], params)
    for index, completion in enumerate(output.completions):
        single = dataclasses.replace(params, n=1, seed=(2**64 - 2 + index) % 2**64)
        [one] = alone(prompt, single).completions
        assert (one.tokens, one.logprobs) == (completion.tokens, completion.logprobs)


@pytest.mark.tier("full")
def test_requests_without_a_seed_are_different_samples_and_tell_their_seeds() -> None:
    prompt, params = (5, 6, 7), SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True)
    outputs = engine(seed_from_prompt=False, max_running=4).generate([prompt] * 4, params)
    assert len({output.completions[0].tokens for output in outputs}) == 4
    [several] = engine(seed_from_prompt=False).generate([prompt], dataclasses.replace(params, n=4))
    assert {c.tokens for c in several.completions}.isdisjoint(output.completions[0].tokens for output in outputs)
    for completion in (outputs[2].completions[0], several.completions[3]):
        assert completion.seed is not None
        [again] = alone(prompt, dataclasses.replace(params, seed=completion.seed)).completions
        assert (again.tokens, again.logprobs) == (completion.tokens, completion.logprobs)


def test_options_for_requests_without_a_seed() -> None:
    prompt, params = (5, 6, 7), SamplingParams(max_new_tokens=8)
    assert bits(engine().generate([prompt], params)[0]) == bits(engine().generate([prompt], params)[0])
    fixed = engine(default_seed=42, seed_from_prompt=False).generate([prompt], params)[0]
    assert bits(fixed) == bits(alone(prompt, SamplingParams(max_new_tokens=8, seed=42)))
    with pytest.raises(ValueError, match="default_seed must be None with seed_from_prompt, got 42"):
        EngineOptions(default_seed=42, seed_from_prompt=True)


def test_the_cache_of_a_prompt_is_found() -> None:
    served = engine()
    prompt, params = tuple(range(20)), SamplingParams(max_new_tokens=2, prompt_logprobs=True, logprob_start_len=9)
    cold = served.generate([prompt], params)[0]
    warm = served.generate([prompt], params)[0]
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 8)  # the log-probability of token 9 is that after token 8
    assert bits(cold) == bits(warm)
    served.flush_cache()
    assert served.generate([prompt], params)[0].cached_tokens == 0
