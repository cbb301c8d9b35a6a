"""`/v1/score` against the log-probabilities that the engine gives, alone and among others."""

import math

import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from tests.serving.fake_engine import logprob
from tests.serving.live import live


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


def expected(query, item):
    tokens = tuple(query + item)
    return [logprob(tokens[:i], 0) for i in range(len(query), len(tokens))]


def score(server, **body):
    reply = server.post("/v1/score", body)
    assert reply.status == 200, reply.body
    return reply.json


def test_log_likelihoods_of_items(server):
    items = ["bc", "d", "efg"]
    found = score(server, query="aé", items=items)
    for item, total, row in zip(items, found["scores"], found["token_logprobs"], strict=True):
        wanted = expected("aé".encode(), item.encode())
        assert_bits_equal(np.array(row, np.float32), np.array(wanted, np.float32))
        assert total == sum(wanted)
    assert found["usage"]["prompt_tokens"] == 3 * 3 + 6
    for given in ("d", [100], [[100]]):
        assert score(server, query=[97, 195, 169], items=given)["scores"] == [found["scores"][1]]


def test_probabilities_of_labels(server):
    rows = score(server, query="ab", items=["c", "d"], label_token_ids=[65, 66])["scores"]
    for item, row in zip(b"cd", rows, strict=True):
        logprobs = [expected([97, 98, item], [label])[0] for label in (65, 66)]
        assert row == pytest.approx([math.exp(value) for value in logprobs], rel=1e-12)
        shares = score(server, query="ab", items=[[item]], label_token_ids=[65, 66], apply_softmax=True)["scores"][0]
        assert shares == pytest.approx([value / sum(row) for value in row], rel=1e-12)
    first = score(server, query="ab", items=["c"], label_token_ids=[65], item_first=True)["scores"]
    assert first == score(server, query="c", items=["ab"], label_token_ids=[65])["scores"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": "a"}, "items: required, but missing"),
        ({"query": "a", "items": []}, "items: must have at least one item"),
        ({"query": "a", "items": ["b", ""]}, "items: an item has no tokens"),
        ({"query": "", "items": ["b"]}, "query: the text before what is scored has no tokens"),
        ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids: must have at least one token"),
        ({"query": "a", "items": ["b"], "label_token_ids": [999]}, "label_token_ids: token ids must be from 0 to 256"),
        ({"query": "a", "items": ["b"], "apply_softmax": True}, "apply_softmax: only allowed together with"),
        ({"query": "a", "items": ["b"], "labels": [1]}, "labels: unknown field"),
    ],
)
def test_bad_input(server, body, message):
    reply = server.post("/v1/score", body)
    assert reply.status == 400
    assert message in reply.error
