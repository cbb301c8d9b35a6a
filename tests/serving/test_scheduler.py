"""Who gets pages and turns, without a device."""

from typing import Any

import numpy as np
import pytest

from bijax.serving import SamplingParams
from bijax.serving.drafts import look_up
from bijax.serving.pages import PagePool
from bijax.serving.prefix import PrefixCache
from bijax.serving.requests import make_request
from bijax.serving.scheduler import Scheduler, Work
from bijax.serving.sizes import Sizes
from bijax.serving.tokens import as_tokens
from tests.tiers import full_only

SIZES: dict[str, Any] = {
    "num_pages": 24,
    "page_size": 4,
    "max_running": 4,
    "max_prefill_tokens": 16,
    "prefix_cache": True,
    "speculative_tokens": 0,
}


class Machine:
    """A scheduler whose device samples random tokens, and writes down which token stands where in its pages.

    With `ahead` the next step is planned before the last one is read, as the engine does without drafts. `stops` is the
    probability that a token ends its sequence.
    """

    def __init__(self, seed: int = 0, *, ahead: bool = False, stops: float = 0.0, **options: Any) -> None:
        self.ahead, self.stops = ahead, stops
        self.in_flight: list[tuple[Work, int | None]] = []
        self.last: dict[int, int] = {}
        self.sizes = SIZES | options
        self.scheduler = Scheduler(**self.sizes)
        self.rng = np.random.default_rng(seed)
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.steps = 0
        self.first_work: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], *, key: tuple[int, int], **params: Any) -> None:
        request = make_request(
            name,
            prompt,
            SamplingParams(**params),
            key=key,
            vocab_size=50,
            longest=96,
            tokenizer=None,
            eos_token_ids=frozenset(),
            default_seed=0,
        )
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def step(self) -> list[Work]:
        self.steps += 1
        works = self.scheduler.plan()
        size = self.sizes["page_size"]
        prefill = sum(len(w.tokens) for w in works if len(w.tokens) - w.drafts > 1)
        assert prefill <= self.sizes["max_prefill_tokens"]
        assert len(self.scheduler.running) <= self.sizes["max_running"]
        slots = [s.slot for s in self.scheduler.running]
        assert len(set(slots)) == len(slots)
        assert min(slots, default=0) >= 0
        for work in works:
            sequence = work.sequence
            assert sequence in self.scheduler.running
            self.first_work.setdefault(sequence.request.id, self.steps)
            context = (*sequence.tokens[: work.start], *work.tokens)
            if work.unread:
                context = (*sequence.tokens, self.last[sequence.slot])
            assert len(context) == work.start + len(work.tokens)
            for position in range(work.start):  # what is read is what was written for these very tokens
                place = (sequence.pages[position // size], position % size)
                assert self.cells[place] == context[: position + 1]
            for position in range(work.start, len(context)):
                page = sequence.pages[position // size]
                others = [s for s in self.scheduler.running if s is not sequence and page in s.pages]
                assert not others, "a page that others read is written"
                self.cells[page, position % size] = context[: position + 1]
        self.scheduler.dispatched(works)
        step = []
        for work in works:
            token = int(self.rng.integers(3)) if work.samples else None
            if token is not None:
                self.last[work.sequence.slot] = token
            step.append((work, token))
        ready, self.in_flight = (self.in_flight, step) if self.ahead else (step, [])
        for work, token in ready:
            self.read(work, token)
        return works

    def read(self, work: Work, token: int | None) -> None:
        sequence = work.sequence
        if sequence.finish_reason is not None:
            return
        if token is not None:
            assert len(sequence.output) < sequence.request.params.max_new_tokens
            sequence.append(token, None)
        elif work.reaches_end:
            sequence.finish("length")
        if sequence.finish_reason is None and self.rng.random() < self.stops:
            sequence.finish("stop")  # as at a stop string, which is found late
        self.scheduler.read(work, 0)
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            waits = bool(self.in_flight)
            assert self.step() or waits, "no progress"

    def pages_are_back(self) -> bool:
        self.scheduler.flush()
        return self.scheduler.pool.free == self.sizes["num_pages"]


@pytest.mark.parametrize("seed", [*range(8), *map(full_only, range(8, 200))])
def test_random_traffic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafts = seed % 2 * 3
    machine = Machine(
        seed,
        ahead=not drafts and seed % 4 == 0,
        stops=0.02,
        prefix_cache=bool(seed % 3),
        speculative_tokens=drafts,
        num_pages=int(rng.integers(24, 40)),
    )
    for index in range(60):
        prompt = rng.integers(0, 3, rng.integers(1, 50)).tolist()
        new, outputs = int(rng.integers(0, 40)), int(rng.integers(1, 4))
        machine.add(str(index), prompt, key=(int(rng.integers(20)), index), max_new_tokens=new, n=outputs)
        for _ in range(rng.integers(0, 4)):
            machine.step()
        if machine.scheduler.running and rng.random() < 0.1:
            aborted = machine.scheduler.running[-1]
            aborted.finish("abort")
            machine.scheduler.remove(aborted)
    machine.run()
    assert machine.scheduler.preemptions > 0
    assert machine.pages_are_back()


def test_nobody_starves() -> None:
    """A request with a low priority gets its turn although ones with a higher priority keep coming."""
    aging = 30
    machine = Machine(max_running=1)
    machine.add("low", [1] * 8, key=(3 * aging, 0), max_new_tokens=4)
    for index in range(1, 200):
        machine.add(f"high {index}", [2] * 8, key=(machine.steps, index), max_new_tokens=4)
        for _ in range(4):  # not as many steps as such a request takes
            machine.step()
        if "low" in machine.first_work:
            break
    assert aging < machine.first_work["low"] < 8 * aging


def test_priority_comes_first() -> None:
    machine = Machine(max_running=1)
    for index, key in enumerate((5, 1, 3)):
        machine.add(str(key), [index] * 5, key=(key, index), max_new_tokens=3)
    machine.run()
    assert sorted(machine.first_work, key=machine.first_work.__getitem__) == ["1", "3", "5"]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_outputs_of_one_prompt_share_its_pages(prefix_cache: bool) -> None:
    machine = Machine(prefix_cache=prefix_cache)
    machine.add("a", list(range(17)), key=(0, 0), max_new_tokens=8, n=3)
    while len(machine.scheduler.running) < 3:
        machine.step()
    pages = [set(s.pages[:4]) for s in machine.scheduler.running]
    assert pages[0] == pages[1] == pages[2]
    machine.run()
    assert machine.pages_are_back()


def test_a_long_prompt_is_cut_and_does_not_stop_the_others() -> None:
    machine = Machine()
    machine.add("short", [1, 2], key=(0, 0), max_new_tokens=20)
    machine.step()
    machine.add("long", list(range(40)), key=(0, 1), max_new_tokens=2)
    for _ in range(3):
        works = {w.sequence.request.id: len(w.tokens) for w in machine.step()}
        assert works["short"] == 1
        assert works["long"] <= 16


def test_the_prefix_cache_gives_up_the_least_recently_used() -> None:
    pool = PagePool(3)
    cache = PrefixCache(pool, page_size=2)
    pages = {}
    for start in (1, 3, 5):
        pages[start] = pool.take()
        cache.insert(as_tokens([start, start + 1]), [pages[start]])
        pool.release(pages[start])
    assert cache.match(as_tokens([1, 2, 9]), limit=2) == [pages[1]]
    assert pool.kept_alone == 2
    assert cache.evict(1) == 1
    assert cache.match(as_tokens([3, 4]), limit=2) == []
    assert cache.match(as_tokens([5, 6]), limit=2) == [pages[5]]
    assert cache.evict(5) == 0  # the others are held
    pool.release(pages[1])
    cache.clear()
    assert pool.free == 2  # one is still held


def test_a_page_is_freed_once() -> None:
    pool = PagePool(1)
    page = pool.take()
    pool.release(page)
    with pytest.raises(ValueError, match="page 0 is free already"):
        pool.release(page)
    with pytest.raises(ValueError, match="page 0 is free; only a page that somebody holds can be shared"):
        pool.hold(page)


def test_drafts() -> None:
    assert look_up([1, 2, 3, 1, 2], 5) == [3, 1, 2]
    assert look_up([7, 1, 2, 8, 9, 1, 2, 3, 9, 1, 2], 2) == [3, 9]  # 9 1 2 counts more than 1 2
    assert look_up([1, 2, 3, 4], 3) == []
    assert look_up([1], 3) == []


@pytest.mark.parametrize("running", [1, 3, 32])
@pytest.mark.parametrize("budget", [1, 16, 100, 256])
@pytest.mark.parametrize("drafts", [0, 7])
def test_every_batch_has_a_size(running: int, budget: int, drafts: int) -> None:
    sizes = Sizes.choose(max_running=running, max_prefill_tokens=budget, speculative_tokens=drafts)
    for rows in range(1, running + 1):
        assert sizes.decode_for(rows) >= rows
        assert (sizes.decode_for(rows), 1) in sizes.shapes
    for tokens in range(1, budget + 1):
        for rows in (1, 2, 5):
            shape = sizes.prefill_for(tokens, rows=rows)
            assert shape in sizes.shapes
            assert shape[1] >= tokens
            assert shape[0] in sizes.decode
