"""Which states are kept and found again, without a device."""

from typing import Any

import numpy as np
import pytest

from bijax.serving import EngineOptions, SamplingParams
from bijax.serving.cache_size import num_snapshots
from bijax.serving.pages import PagePool
from bijax.serving.prefix import PrefixCache
from bijax.serving.requests import make_request
from bijax.serving.scheduler import Scheduler, Work
from bijax.serving.states import States
from bijax.serving.tokens import as_tokens
from tests.tiers import full_only

INTERVAL, PAGE_SIZE = 8, 4


class Machine:
    """A scheduler whose device keeps, for each slot and snapshot, the tokens that its state was computed from."""

    def __init__(self, seed: int, **options: Any) -> None:
        sizes: dict[str, Any] = {
            "num_pages": 30, "page_size": PAGE_SIZE, "max_running": 4, "max_prefill_tokens": 16, "prefix_cache": True,
            "speculative_tokens": 0,
        }  # fmt: skip
        interval = options.pop("snapshot_interval", 16)
        number = options.pop("num_snapshots", 6)
        self.states = States(interval=INTERVAL, page_size=PAGE_SIZE, num_snapshots=number, snapshot_interval=interval)
        self.scheduler = Scheduler(**sizes | options, states=self.states)
        self.rng = np.random.default_rng(seed)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.restored = self.drafted = 0

    def add(self, name: str, prompt: list[int], *, key: tuple[int, int], **params: Any) -> None:
        request = make_request(
            name, prompt, SamplingParams(**params), key=key, vocab_size=50, longest=96, tokenizer=None,
            eos_token_ids=frozenset(), default_seed=0,
        )  # fmt: skip
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def step(self) -> bool:
        works = self.scheduler.plan()
        for slot, row, position in self.states.restores:
            assert len(self.snapshots[row]) == position
            self.slots[slot] = self.snapshots[row]
            self.restored += 1
        self.states.restores.clear()
        for work in works:
            self.compute(work)
        self.scheduler.dispatched(works)
        self.keep()
        for work in works:
            self.read(work)
        self.keep()
        return bool(works)

    def compute(self, work: Work) -> None:
        sequence, drafts = work.sequence, work.drafts
        state = () if work.start == 0 else self.slots[sequence.slot]
        assert state[: work.start] == tuple(sequence.tokens[: work.start])
        # Tokens that are written again are after the last multiple that the state has passed.
        passed = max(len(state) - 1, 0) // INTERVAL * INTERVAL
        assert work.start >= passed
        end = work.start + len(work.tokens)
        if drafts:
            assert (end - 1) // INTERVAL == work.start // INTERVAL
            self.drafted += 1
        self.slots[sequence.slot] = (*state[: work.start], *work.tokens)

    def keep(self) -> None:
        for slot, row, position in self.states.keeps:
            assert position % INTERVAL == position % PAGE_SIZE == 0
            self.snapshots[row] = self.slots[slot][:position]
            assert len(self.snapshots[row]) == position
        self.states.keeps.clear()

    def read(self, work: Work) -> None:
        sequence = work.sequence
        drafts, taken = work.tokens[len(work.tokens) - work.drafts :] if work.drafts else (), 0
        for place in range(work.drafts + 1 if work.samples else 0):
            # The model often samples what was drafted.
            right = place < work.drafts and self.rng.random() < 0.7
            token = int(drafts[place]) if right else int(self.rng.integers(3))
            taken += 1
            sequence.append(token, None)
            if sequence.finish_reason is not None or place == work.drafts or drafts[place] != token:
                break
        if not work.samples and work.reaches_end:
            sequence.finish("length")
        self.scheduler.read(work, max(0, taken - 1))
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)


@pytest.mark.parametrize("seed", [*range(6), *map(full_only, range(6, 150))])
def test_random_traffic(seed: int) -> None:
    """A sequence's state is always that of its own tokens: from snapshots, after drafts, preempted, evicted."""
    rng = np.random.default_rng(seed)
    machine = Machine(
        seed,
        prefix_cache=bool(seed % 3),
        speculative_tokens=seed % 2 * 5,
        num_pages=int(rng.integers(26, 40)),
        num_snapshots=int(rng.choice([0, 2, 6, 12])) if seed % 4 == 3 else 6,
        snapshot_interval=int(rng.choice([8, 16, 32])),
    )
    starts = [rng.integers(0, 3, 40).tolist() for _ in range(3)]
    for index in range(50):
        shared = starts[rng.integers(3)][: rng.integers(1, 40)]
        prompt = [*shared, *rng.integers(0, 3, rng.integers(1, 20)).tolist()]
        new, outputs = int(rng.integers(0, 30)), int(rng.integers(1, 4))
        machine.add(str(index), prompt, key=(int(rng.integers(20)), index), max_new_tokens=new, n=outputs)
        for _ in range(rng.integers(0, 4)):
            machine.step()
        if machine.scheduler.running and rng.random() < 0.1:
            aborted = machine.scheduler.running[-1]
            aborted.finish("abort")
            machine.scheduler.remove(aborted)
    while machine.scheduler.running or machine.scheduler.waiting:
        assert machine.step(), "no progress"
    assert machine.scheduler.preemptions > 0
    if machine.states.pool.num_pages:
        assert machine.restored > 0
    assert (machine.drafted > 0) == bool(seed % 2)
    machine.scheduler.flush()
    assert machine.states.pool.free == machine.states.pool.num_pages
    assert machine.scheduler.pool.free == machine.scheduler.pool.num_pages


def test_a_match_ends_at_the_last_snapshot() -> None:
    pages, snapshots = PagePool(8), PagePool(2)
    cache = PrefixCache(pages, 2, snapshots)
    tokens = as_tokens([1, 2, 3, 4, 5, 6])
    cache.insert(tokens, [pages.take() for _ in range(3)])
    assert cache.match_snapshot(tokens, limit=6) == ([], None)
    row = snapshots.take()
    cache.attach(tokens, 4, row)
    cache.attach(tokens, 8, row)  # past what is known
    found, at = cache.match_snapshot(tokens, limit=6)
    assert (len(found), at, snapshots.holders(row)) == (2, row, 3)
    assert cache.match_snapshot(tokens, limit=3) == ([], None)
    assert not cache.evict_snapshot()  # others hold it
    snapshots.release(row)
    snapshots.release(row)
    assert cache.evict_snapshot()
    assert (snapshots.free, cache.match_snapshot(tokens, limit=6)) == (2, ([], None))


def test_the_pages_of_a_snapshot_go_with_it() -> None:
    pages, snapshots = PagePool(2), PagePool(1)
    cache = PrefixCache(pages, 2, snapshots)
    page, row = pages.take(), snapshots.take()
    cache.insert(as_tokens([1, 2]), [page])
    cache.attach(as_tokens([1, 2]), 2, row)
    pages.release(page)
    snapshots.release(row)
    assert cache.evict(1) == 1
    assert (pages.free, snapshots.free) == (2, 1)


def test_kept_positions() -> None:
    states = States(interval=64, page_size=16, num_snapshots=1, snapshot_interval=128)
    assert states.kept(prompt=64, tokens=64) == []  # the last token of a prompt is always computed
    assert states.kept(prompt=65, tokens=65) == [64]
    assert states.kept(prompt=300, tokens=400) == [128, 256, 384]
    assert [states.most_drafts(start) for start in (0, 62, 63, 64)] == [63, 1, 0, 63]
    coarse = States(interval=64, page_size=128, num_snapshots=1, snapshot_interval=256)
    assert coarse.kept(prompt=400, tokens=400) == [256, 384]
    assert [num_snapshots(EngineOptions(max_running=8, state_snapshots=n)) for n in (None, 0, 5)] == [16, 0, 5]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"page_size must divide 64 or be a multiple of it .* got 24"):
        States(interval=64, page_size=24, num_snapshots=1, snapshot_interval=4096)
    with pytest.raises(ValueError, match=r"snapshot_interval must be a multiple of 128 .* page_size=128, got 64"):
        States(interval=64, page_size=128, num_snapshots=1, snapshot_interval=64)
