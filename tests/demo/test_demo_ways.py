"""The ways of computing: which prompts share a batch, and at which places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bijax.demo import ways

SIZES = (4, 8)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 3))
def test_every_batch_is_full_and_every_prompt_has_a_turn(prompts, size, rounds):
    batches = ways.mixed_batches(range(prompts), size, rounds)
    assert all(len(batch) == size for batch in batches)
    per_round = -(-prompts // size)
    assert len(batches) == rounds * per_round
    for turn in range(rounds):
        seen = {prompt for batch in batches[turn * per_round : (turn + 1) * per_round] for prompt in batch}
        assert seen == set(range(prompts))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_stands_at_other_places_among_others(size, seed):
    way = next(way for way in ways.other_ways(8, seed=seed) if way.name == f"batches of {size}")
    for prompt in range(8):
        places = {batch.index(prompt) for batch in way.batches if prompt in batch}
        assert len(places) >= 2
        company = [frozenset(batch) for batch in way.batches if prompt in batch]
        if size < 8:
            assert len(set(company)) >= 2


def test_no_prompt_meets_itself_where_there_are_enough():
    for size in (2, 4, 8):
        for batch in ways.mixed_batches(range(8), size, 2):
            assert len(set(batch)) == size


def test_the_seed_decides():
    assert ways.other_ways(8, seed=3) == ways.other_ways(8, seed=3)
    assert ways.other_ways(8, seed=3) != ways.other_ways(8, seed=4)


def test_all_ways_are_there():
    found = ways.other_ways(8, seed=0)
    assert [len(way.batches[0]) for way in found[:3]] == [2, 4, 8]
    assert {(way.prefill_chunk, way.cache) for way in found[3:]} == {(None, "paged"), (7, "contiguous"), (7, "paged")}
    assert len({way.name for way in found}) == len(found) == 6


def test_quick_has_a_batch_and_a_chunked_prefill():
    batch, chunked = ways.other_ways(2, seed=0, quick=True)
    assert {len(batch.batches[0]), len(chunked.batches[0])} == {4}
    assert (chunked.prefill_chunk, chunked.cache) == (7, "paged")
