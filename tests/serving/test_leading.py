"""Engines of several processes: calls that are repeated, here in a thread, and processes that are lost."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

import pytest

from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.serving.errors import EngineError
from bijax.serving.processes import LeadingEngine, follow
from bijax.serving.toy import ToyModel

OPTIONS = EngineOptions(page_size=4, num_pages=16, max_running=1, max_prefill_tokens=1, max_length=24)


def model(seed: int = 0) -> ToyModel:
    """Returns a model of the size of the other tests of the engine."""
    return ToyModel.random(seed=seed, width=32, max_length=68)


class Recorded(Engine):
    """An engine that keeps the outputs of its steps."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.calls: list[str] = []
        self.seen: dict[str, tuple[int, ...]] = {}

    def step(self, watched: Any = None) -> Any:
        self.calls.append("step")
        outputs = super().step(None)
        self.seen |= {output.request_id: output.completions[0].tokens for output in outputs}
        return outputs

    def pause(self) -> None:
        self.calls.append("pause")
        super().pause()


@contextmanager
def two(options: EngineOptions = OPTIONS) -> Iterator[tuple[LeadingEngine, Recorded, Callable[[], Any]]]:
    """A leader and a follower, and a function that waits for the follower's end and returns what it raised."""
    here, there = Pipe()
    leader = LeadingEngine([here], model(), options=options)
    follower = Recorded(model(), options=options)
    raised: list[BaseException | None] = [None]

    def run() -> None:
        try:
            follow(follower, there)
        except BaseException as error:
            raised[0] = error
        there.close()

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> BaseException | None:
        thread.join(60)
        assert not thread.is_alive()
        return raised[0]

    try:
        yield leader, follower, end
    finally:
        here.close()
        thread.join(60)


def test_the_follower_does_what_the_leader_does() -> None:
    """Requests without seeds too, which would draw another one in each process; what is refused reaches nobody."""
    with two() as (leader, follower, end):
        prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12, 13, 14]]
        params = [SamplingParams(max_new_tokens=n, temperature=1.0, n=1) for n in (4, 6, 3)]
        outputs = leader.generate(prompts, params)
        with pytest.raises(ValueError, match="at most"):
            leader.add([1] * 100)
        with pytest.raises(TypeError, match="must be SamplingParams"):
            leader.add([1], {"n": 1})  # type: ignore[arg-type]
        leader.add([1, 2], SamplingParams(max_new_tokens=5), request_id="ended")
        leader.step()
        assert leader.abort("ended") is not None
        leader.pause()
        leader.resume()
        leader.flush_cache()
        with pytest.raises(ValueError, match="cannot be updated over several processes"):
            leader.update_weights(model(1))
        leader.dismiss()
        assert end() is None
        for output in outputs:
            assert follower.seen[output.request_id] == output.completions[0].tokens
        assert follower.stats().kv_cache_usage == leader.stats().kv_cache_usage == 0
        assert (follower.calls.count("pause"), follower.calls.count("step")) == (1, leader._steps)


def test_seeds_that_options_choose_are_left_to_them() -> None:
    options = EngineOptions(**{**vars(OPTIONS), "seed_from_prompt": True})
    alone = Engine(model(), options=options)
    with two(options) as (leader, follower, end):
        params = SamplingParams(max_new_tokens=4, temperature=1.0)
        [one], [other] = (engine.generate([[1, 2, 3]], params) for engine in (leader, alone))
        leader.dismiss()
        assert end() is None
        assert one.completions[0].tokens == other.completions[0].tokens == follower.seen[one.request_id]


def test_a_leader_that_is_lost() -> None:
    here, there = Pipe()
    here.close()
    with pytest.raises(EngineError, match="process 0, which this one follows, ended"):
        follow(Engine(model(), options=OPTIONS), there)


def test_a_follower_that_is_lost() -> None:
    lost: list[tuple[int, str]] = []
    told = threading.Event()

    def on_lost(number: int, why: str) -> None:
        lost.append((number, why))
        told.set()

    pipes = [Pipe(), Pipe()]
    leader = LeadingEngine([here for here, _ in pipes], model(), options=OPTIONS)
    leader.watch(on_lost)
    pipes[1][1].close()
    assert told.wait(60)
    assert lost == [(2, "it ended")]
    leader.pause()  # sends to nobody there, and goes on
    leader.dismiss()
    pipes[0][1].close()  # in order: nobody is told


def test_a_follower_that_fails_tells_why() -> None:
    with two() as (leader, follower, end):
        lost: list[tuple[int, str]] = []
        told = threading.Event()

        def on_lost(number: int, why: str) -> None:
            lost.append((number, why))
            told.set()

        def broken() -> None:
            raise RuntimeError("no memory")

        follower.flush_cache = broken  # type: ignore[method-assign]
        leader.watch(on_lost)
        leader.flush_cache()
        assert told.wait(60)
        assert lost == [(1, "RuntimeError: no memory")]
        assert isinstance(end(), RuntimeError)
