"""Embeddings of prompts: the same bits alone, among others, in chunks and from a cache, and over HTTP."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from bijax.serving import AsyncEngine, Engine, EngineOptions, RequestOutput, SamplingParams
from bijax.testing import assert_bits_equal
from tests.serving.bigrams import WIDTH, Bigrams
from tests.serving.fake_engine import END, VOCABULARY, ByteTokenizer
from tests.serving.live import Live, live

PARAMS = SamplingParams(max_new_tokens=0, embedding=True)


def engine(**options: Any) -> Engine:
    small = {"page_size": 4, "num_pages": 40, "max_running": 2, "max_prefill_tokens": 16}  # the sizes of test_mtp.py
    options = small | options
    return Engine(Bigrams(), tokenizer=ByteTokenizer(), eos_token_ids=[END], options=EngineOptions(**options))


def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, VOCABULARY, n).tolist()) for n in (1, 5, 30, 16, 4)]


def rows(outputs: list[RequestOutput]) -> np.ndarray:
    assert all(output.finished and output.embedding is not None for output in outputs)
    return np.array([output.embedding for output in outputs], np.float32)


@pytest.mark.parametrize("invariant", [True, False])
def test_bits_do_not_depend_on_others_and_the_cache(invariant: bool) -> None:
    """With bijax: the control shows that with JAX's own operations they do."""
    served = engine(enable_deterministic_inference=invariant)
    alone = rows([served.generate([prompt], PARAMS)[0] for prompt in prompts()])
    beside = [SamplingParams(max_new_tokens=9, seed=1, ignore_eos=True)] * 2
    outputs = served.generate([*prompts(), (5, 6, 7), (8,)], [*[PARAMS] * 5, *beside])
    assert outputs[-1].embedding is None
    again = rows(served.generate(prompts()[::-1], PARAMS))[::-1]
    assert served.stats().prefix_hits > 0
    assert alone.shape == (5, WIDTH)
    if invariant:
        assert_bits_equal(rows(outputs[:5]), alone)
        assert_bits_equal(again, alone)
        assert len(np.unique(alone, axis=0)) == 5
    else:
        assert not (np.array_equal(rows(outputs[:5]), alone) and np.array_equal(again, alone))


def test_what_embeddings_need() -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be 0 with embedding=True, got 128"):
        SamplingParams(embedding=True)


@contextlib.contextmanager
def served() -> Iterator[Live]:
    async def open_engine() -> AsyncEngine:
        return AsyncEngine(engine())

    with live(open_engine=open_engine) as server:
        yield server


def test_the_endpoint() -> None:
    with served() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        found = client.embeddings.create(model="fake", input=["abc", "d"])  # asks for base64
        floats = client.embeddings.create(model="fake", input=[[97, 98, 99], [100]], encoding_format="float")
        for one, other in zip(found.data, floats.data, strict=True):
            assert_bits_equal(np.array(one.embedding, np.float32), np.array(other.embedding, np.float32))
            assert np.linalg.norm(np.array(one.embedding, np.float64)) == pytest.approx(1, abs=1e-6)
        assert found.usage.prompt_tokens == 4
        assert client.embeddings.create(model="fake", input="abc").data[0].embedding == found.data[0].embedding
        for body, message in (
            ({"input": []}, "input: must be a string"),
            ({"input": "a", "dimensions": 3}, "dimensions:"),
        ):
            reply = server.post("/v1/embeddings", body)
            assert (reply.status, message in reply.error) == (400, True)
