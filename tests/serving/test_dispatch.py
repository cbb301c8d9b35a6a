"""The device is given the next step before the last one's tokens are read."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from bijax.serving import Engine, EngineOptions, RequestOutput, SamplingParams, programs
from bijax.serving.device import HOST, advance_and_draw
from bijax.serving.programs import Drawn, Programs
from bijax.serving.step import Results, Step
from bijax.serving.toy import ToyModel
from tests.serving.traffic import SMALL, VOCABULARY, Letters, all_pages_are_back, alone, bits, engine, model

PROMPT = tuple(range(40, 52))
DECODE: dict[str, Any] = {"ignore_eos": True, "logprobs": True, "seed": 5}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes down when steps are dispatched and read."""
    written: list[str] = []
    dispatch, read = Step.__init__, Step.read

    def noted_dispatch(self: Step, *arguments: Any) -> None:
        written.append("dispatch")
        dispatch(self, *arguments)

    def noted_read(self: Step) -> Results:
        written.append("read")
        return read(self)

    monkeypatch.setattr(Step, "__init__", noted_dispatch)
    monkeypatch.setattr(Step, "read", noted_read)
    return written


def reads_before_the_next_dispatch(events: list[str]) -> int:
    """Returns how many reads had no step in the device after theirs; the last one of all never has."""
    ahead = early = 0
    for event in events:
        ahead += 1 if event == "dispatch" else -1
        early += event == "read" and not ahead
    return early


def test_no_read_comes_before_the_next_dispatch(events: list[str]) -> None:
    """The control: without `dispatch_ahead`, each of them does."""
    params = SamplingParams(max_new_tokens=12, **DECODE)
    found = []
    for ahead in (True, False):
        served = engine(speculative_tokens=0, dispatch_ahead=ahead)
        events.clear()
        found.append(bits(served.generate([PROMPT], params)[0]))
        assert events.count("dispatch") == events.count("read") == 12  # no step is wasted where the length is known
        assert reads_before_the_next_dispatch(events) == (1 if ahead else 12)
    assert found[0] == found[1] == bits(alone(PROMPT, params))


def test_the_device_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to it in most steps of two sequences, though they get pages at different times.

    And no array moves, or a GPU's graph of kernels would be changed in each step.
    """
    sent: list[bool] = []
    places: list[list[int]] = []
    found = Programs._on_device

    def noted(self: Programs, packed: np.ndarray) -> Any:
        given = found(self, packed)
        sent.append(given is packed)
        if packed.shape in self._memory and not sent[-1]:
            arrays = jax.tree.leaves((self._pages, self._last, self._memory[packed.shape], given))
            places.append([array.unsafe_buffer_pointer() for array in arrays])
        return given

    monkeypatch.setattr(Programs, "_on_device", noted)
    served = engine(one_program=True, speculative_tokens=0)
    prompts = [PROMPT, PROMPT[:7]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=5)
    outputs = served.generate(prompts, params)
    assert [bits(output) for output in outputs] == [bits(alone(prompt, params)) for prompt in prompts]
    assert len(sent) >= 24
    assert sum(sent) <= len(sent) / 2
    assert len({tuple(row[:-1]) for row in places}) == 1
    # The last array is a new one where something was sent.
    assert sum(before[-1] == row[-1] for before, row in itertools.pairwise(places)) >= len(places) / 2
    assert all_pages_are_back(served)


@pytest.mark.tier("full")
def test_programs_write_what_the_host_reads_into_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    kinds: set[str] = set()
    sample = Step._sample

    def noted(self: Step, works: Any, drawn: Drawn) -> None:
        kinds.update(array.sharding.memory_kind for array in jax.tree.leaves(drawn))
        sample(self, works, drawn)

    monkeypatch.setattr(Step, "_sample", noted)
    monkeypatch.setattr(programs, "_one_gpu", lambda pages: jax.devices()[0])
    served = engine(one_program=True, speculative_tokens=0)
    params = SamplingParams(max_new_tokens=6, prompt_logprobs=True, top_logprobs=2, **DECODE)
    compiled = advance_and_draw._cache_size()
    [output] = served.generate([PROMPT], params)
    served.flush_cache()
    assert bits(served.generate([PROMPT], params)[0]) == bits(output)
    assert advance_and_draw._cache_size() == compiled + 2  # a prompt and a token: nothing is compiled twice
    assert kinds == {HOST}
    monkeypatch.undo()
    assert bits(output) == bits(alone(PROMPT, params))


def test_a_stop_found_late_drops_the_token_behind_it() -> None:
    """Stop strings, stop tokens, and penalties that count the token which the host has not read."""
    [free] = engine(speculative_tokens=0).generate([PROMPT], SamplingParams(max_new_tokens=20, **DECODE))
    tokens = free.completions[0].tokens
    stop = SamplingParams(max_new_tokens=20, stop_token_ids=(tokens[9],), **DECODE)
    first = tokens.index(tokens[9])
    text = Letters().decode([t for t in tokens[:6] if t < 150])[-4:]
    requests = [
        stop,
        SamplingParams(max_new_tokens=20, stop=(text,), **DECODE),
        SamplingParams(max_new_tokens=20, frequency_penalty=2.0, repetition_penalty=1.5, **DECODE),
        SamplingParams(max_new_tokens=20, presence_penalty=2.0, min_new_tokens=12, stop_token_ids=tokens, **DECODE),
    ]
    results = []
    for ahead in (True, False):
        served = engine(speculative_tokens=0, dispatch_ahead=ahead)
        outputs = served.generate([PROMPT] * len(requests), requests)
        assert all_pages_are_back(served)
        results.append([bits(output) for output in outputs])
    assert results[0] == results[1] == [bits(alone(PROMPT, params)) for params in requests]
    assert outputs[0].completions[0].tokens == tokens[: first + 1]
    assert outputs[1].completions[0].finish_reason == "stop"


def test_an_abort_with_a_step_in_flight() -> None:
    served = engine(speculative_tokens=0)
    params = SamplingParams(max_new_tokens=12, **DECODE)
    served.add(PROMPT, params, request_id="ends")
    served.add(PROMPT[:5], params, request_id="stays")
    for _ in range(4):
        served.step()
    ended = served.abort("ends")
    assert ended is not None
    before = ended.completions[0].tokens
    served.add(PROMPT, params, request_id="ends")  # the same name, while the old step is in flight
    done: dict[str, RequestOutput] = {}
    while served.has_work:
        done |= {output.request_id: output for output in served.step() if output.finished}
    assert ended.completions[0].tokens == before == done["ends"].completions[0].tokens[: len(before)]
    for name, prompt in (("ends", PROMPT), ("stays", PROMPT[:5])):
        assert bits(done[name]) == bits(alone(prompt, params))
    assert all_pages_are_back(served)


def test_a_pause_and_new_weights_with_a_step_in_flight() -> None:
    """What the device has computed is returned in the pause, with the version of its weights."""
    served = engine(speculative_tokens=0)
    params = SamplingParams(max_new_tokens=12, **DECODE)
    served.add(PROMPT, params)
    for _ in range(4):
        served.step()
    served.pause()
    served.update_weights(
        ToyModel.random(seed=9, vocab_size=VOCABULARY, width=32, max_length=model().max_length), "nine"
    )
    assert served.has_work
    [output] = served.step()
    old = output.completions[0].tokens
    assert (output.weight_version, len(old), served.has_work) == ("default", 4, False)
    assert served.step() == []
    served.resume()
    while served.has_work:
        [output] = served.step() or [output]
    other = Engine(
        ToyModel.random(seed=9, vocab_size=VOCABULARY, width=32, max_length=model().max_length),
        options=EngineOptions(**SMALL),
    )
    [continued] = other.generate([PROMPT + old], SamplingParams(max_new_tokens=8, **DECODE))
    assert output.weight_version == "nine"
    assert output.completions[0].tokens == old + continued.completions[0].tokens


def test_logits_that_are_not_numbers_end_one_request() -> None:
    """A row of nan samples no token; what was dispatched after it changes no other request."""
    weights = model().weights
    broken = ToyModel(weights._replace(positions=weights.positions.at[14].set(np.nan)))
    served = Engine(broken, options=EngineOptions(**(SMALL | {"speculative_tokens": 0})))
    params = [SamplingParams(max_new_tokens=n, **DECODE) for n in (9, 6)]
    long, short = served.generate([PROMPT, PROMPT[:3]], params)
    assert (long.completions[0].finish_reason, len(long.completions[0].tokens)) == ("abort", 3)
    assert short.completions[0].tokens == alone(PROMPT[:3], params[1]).completions[0].tokens
    assert all_pages_are_back(served)
