"""Sequences that begin with the same pages: the engine's program for them, and when it is used."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.serving import Engine, EngineOptions, SamplingParams, device
from bijax.serving.packed import Given, pack, unpack
from bijax.serving.programs import Programs
from bijax.serving.sizes import Sizes
from bijax.testing import assert_bits_equal
from tests.serving.traffic import VOCABULARY, Letters, all_pages_are_back, alone, bits, model

PROMPT = tuple(range(40, 52))
ASKS = dataclasses.replace(model(), one_program=True, least_common_prefix=8)


def programs() -> Programs:
    sizes = Sizes.choose(max_running=8, max_prefill_tokens=16, speculative_tokens=0)
    shapes = {"num_pages": 18, "page_size": 4, "table_width": 4, "num_slots": 8}
    return Programs(ASKS, sizes, **shapes, batch_invariant=True)


def test_sequences_begin_alike_where_they_have_the_same_page() -> None:
    found = programs()
    assert [found.asks_for_common_prefix(*shape) for shape in ((8, 1), (8, 4), (4, 1))] == [True, False, False]
    found.slots.table[:3] = [[5, 6, 7, 8], [5, 6, 9, 10], [5, 11, 7, 8]]
    assert found.have_common_prefix([0, 1], [8, 13])
    assert not found.have_common_prefix([0, 1], [13, 7])
    assert not found.have_common_prefix([0, 1, 2], [13, 13, 13])


def two_of_four() -> Given:
    """What the model is given for two sequences with two pages in common, and two rows of padding."""
    rows = np.array([[0, 0, 0, 0, 0, 5, 6, 7], [0, 0, 0, 0, 0, 5, 6, 8]], np.int32)
    packed = jnp.asarray(pack([(9, 1, -1, 0), (11, 1, -1, 1)], rows, [[3], [4]], 4, 1))
    return unpack(packed, jnp.zeros(8, jnp.int32), table_width=3)


def test_what_is_common_is_counted_on_the_device() -> None:
    """Rows of padding say nothing."""
    given = two_of_four()
    assert int(device._common_tokens(given, 4)) == 8
    assert int(device._common_tokens(given._replace(page_table=given.page_table.at[1, 0].set(9)), 4)) == 0
    assert int(device._common_tokens(given._replace(lengths=jnp.array([1, 0, 0, 0])), 4)) == 12


@pytest.mark.tier("full")
def test_a_model_that_is_told_gives_the_same_bits() -> None:
    """The operation makes nan of what does not lie in the pages that it is told of."""
    given = two_of_four()
    filled = jax.random.normal(jax.random.key(0), ASKS.init_pages(18, 4)[0].shape)
    own, told = (
        device.advance(ASKS, (filled + 0, filled + 0), given, common_page_size=size).logits[:2] for size in (None, 4)
    )
    assert np.isfinite(np.asarray(own)).all()
    assert_bits_equal(told, own)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Writes down the rows of each call, and whether the model is told what sequences begin with."""
    written: list[tuple[int, bool]] = []
    advance = Programs.advance

    def noted(self: Programs, packed: np.ndarray, rows: Any, *, common_prefix: bool = False) -> Any:
        written.append((len(packed), common_prefix))
        return advance(self, packed, rows, common_prefix=common_prefix)

    monkeypatch.setattr(Programs, "advance", noted)
    return written


@pytest.mark.tier("full")
def test_the_model_is_told_where_all_sequences_begin_alike(told: list[tuple[int, bool]]) -> None:
    options = EngineOptions(page_size=4, num_pages=64, max_running=8, max_prefill_tokens=16)
    served = Engine(ASKS, tokenizer=Letters(), eos_token_ids=(3,), options=options)
    served.warm_up()
    told.clear()
    given: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": True, "seed": 5}
    params = SamplingParams(n=8, **given)
    [output] = served.generate([PROMPT], params)
    assert bits(output) == bits(alone(PROMPT, params))
    assert told.count((8, True)) >= 5
    told.clear()
    others = [tuple(np.random.default_rng(i).integers(4, VOCABULARY, 12).tolist()) for i in range(8)]
    params = SamplingParams(**given)
    outputs = served.generate(others, params)
    assert [bits(x) for x in outputs] == [bits(alone(prompt, params)) for prompt in others]
    assert (8, False) in told
    assert (8, True) not in told
    assert all_pages_are_back(served)
