"""A step that an error or Ctrl-C breaks off: the engine can still be used, and bits stay."""

from collections.abc import Callable
from typing import Any

import pytest

from bijax.serving import Engine, SamplingParams, device
from bijax.serving.programs import Programs
from bijax.serving.scheduler import Scheduler
from bijax.serving.sequence import Sequence
from bijax.serving.step import Step
from bijax.serving.text import TextStream
from tests.serving.traffic import all_pages_are_back, alone, bits, engine

PROMPTS = [tuple(range(40, 52)), (*range(40, 49), 7, 7), (3, 9, 27)]
PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=True, prompt_logprobs=True, seed=5)


def break_off(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *, call: int, before: bool) -> None:
    """Lets a function raise at one call, before or after what it does."""
    found: Callable[..., Any] = getattr(where, name)
    calls = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and before:
            raise KeyboardInterrupt
        result = found(*args, **kwargs)
        if calls == call:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(where, name, broken)


def run(served: Engine) -> dict[str, Any]:
    """Steps to the end, continuing after each interruption."""
    outputs = {}
    breaks = 0
    while served.has_work:
        try:
            for output in served.step():
                if output.finished:
                    outputs[output.request_id] = bits(output)
        except KeyboardInterrupt:
            breaks += 1
    assert breaks == 1
    return outputs


@pytest.mark.parametrize(
    ("where", "name", "call", "before"),
    [
        (device, "advance_and_draw", 1, False),  # the cache is used up
        (device, "advance_and_draw", 6, False),
        (Step, "read", 3, True),  # what was sampled is lost
        (Step, "read", 6, False),
        (Scheduler, "_admit", 2, False),  # it has pages, and no work
        (Scheduler, "dispatched", 4, True),
        (Sequence, "append", 5, False),  # some have got their tokens
        (TextStream, "add", 8, True),  # it has a token, and not its text
        (Sequence, "finish", 1, False),
        (Engine, "_finish", 2, True),  # its output was not returned
    ],
)
def test_requests_go_on(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, call: int, before: bool) -> None:
    served = engine(one_program=True, speculative_tokens=0)
    break_off(monkeypatch, where, name, call=call, before=before)
    names = [served.add(prompt, PARAMS) for prompt in PROMPTS]
    outputs = run(served)
    monkeypatch.undo()
    assert [outputs[name] for name in names] == [bits(alone(prompt, PARAMS)) for prompt in PROMPTS]
    assert all_pages_are_back(served)


def test_what_comes_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of the interrupted call are no longer served, and the cache holds no page of theirs."""
    served = engine(one_program=True, speculative_tokens=0)
    expected = [bits(alone(prompt, PARAMS)) for prompt in PROMPTS]
    assert [bits(output) for output in served.generate(PROMPTS, PARAMS)] == expected
    with monkeypatch.context() as patched:
        break_off(patched, device, "advance_and_draw", call=3, before=False)
        with pytest.raises(KeyboardInterrupt):
            served.generate(PROMPTS, PARAMS)
    assert not served.has_work
    assert served.stats().kv_cache_usage == 0
    assert [bits(output) for output in served.generate(PROMPTS, PARAMS)] == expected
    assert all_pages_are_back(served)


def test_a_warm_up_is_interrupted() -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    served = engine(one_program=True, speculative_tokens=0)
    with pytest.raises(KeyboardInterrupt):
        served.warm_up(stop)
    [output] = served.generate(PROMPTS[:1], PARAMS)
    assert bits(output) == bits(alone(PROMPTS[0], PARAMS))


def test_a_cache_that_was_used_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without starting over, the next step finds no cache."""
    served = engine(one_program=True, speculative_tokens=0)
    monkeypatch.setattr(Programs, "start_over", lambda _: None)
    with monkeypatch.context() as patched:
        break_off(patched, device, "advance_and_draw", call=2, before=False)
        with pytest.raises(KeyboardInterrupt):
            served.generate(PROMPTS[:1], PARAMS)
    with pytest.raises(RuntimeError, match="deleted"):
        served.generate(PROMPTS[:1], PARAMS)
