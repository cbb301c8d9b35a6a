"""Each request gets the bits of its own run alone, whatever the traffic."""

import collections
from typing import Any

import numpy as np
import pytest

from bijax.serving import RequestOutput
from tests.exhaustive import rarely
from tests.serving.traffic import all_pages_are_back, alone, bits, engine, random_requests

WAYS: dict[str, dict[str, Any]] = {
    "pages run out": {},
    "no prefix cache": {"prefix_cache": False},
    "speculation": {"speculative_tokens": 3, "num_pages": 40},
}


@pytest.mark.parametrize("number", [26, rarely(400)])
@pytest.mark.parametrize("way", WAYS)
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
    if way == "pages run out":
        assert stats.preemptions > 0
        assert 0 < stats.prefix_hits < stats.prefix_queries
    if way == "speculation":
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_plain_operations_give_other_bits() -> None:
    """The same traffic through the same engine with JAX's own operations is not what each request gets alone."""
    requests = [r for r in random_requests(26, seed=1) if r[1].logprobs]
    together = engine(enable_deterministic_inference=False, num_pages=64).generate(*zip(*requests, strict=True))
    one = engine(enable_deterministic_inference=False, prefix_cache=False)
    apart = [one.generate([prompt], params)[0] for prompt, params in requests]
    assert [bits(o) for o in together] != [bits(o) for o in apart]
