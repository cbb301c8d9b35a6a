"""The server on the real engine, with a tiny model: the same request, the same bits, whatever the traffic."""

import asyncio
import http.client
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bijax.serving import AsyncEngine, Engine, EngineError, EngineOptions
from tests.serving.determinism_client import MODES, SENTENCE, Client, answer, run
from tests.serving.engine_server import OPTIONS, serve, toy
from tests.serving.live import wait_until

PREFIXES = (1, 31, 64, 97)


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


def is_idle(server):
    stats = server.engine.stats()
    return server.service.num_running == stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0


@pytest.mark.tier("full", fast=("0.0-single", "0.0-prefix", "2.0-p_vs_d"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_every_mode_of_the_determinism_client_finds_one_answer(server, mode, temperature):
    client = Client(server.url, max_new_tokens=6, temperature=temperature, prefixes=PREFIXES)
    lines = []
    assert set(run(client, mode, 5, lines.append)) == {1}
    assert all(line.endswith("Unique samples: 1") for line in lines)


def test_the_client_finds_what_differs(server):
    """The control: other weights, and other seeds, have other answers."""
    client = Client(server.url, max_new_tokens=6, temperature=2.0)
    with serve(seed=1) as other:
        found = {Client(url, max_new_tokens=6).answers(["abc"])[0] for url in (server.url, other.url)}
    assert len(found) == 2
    seeds = [client.sampling | {"sampling_seed": seed} for seed in (1, 2)]
    assert len(set(client.answers(["abc", "abc"], sampling_params=seeds))) == 2


def requests(count, seed=0):
    draw = random.Random(seed)
    return [
        {
            "text": SENTENCE[draw.randrange(20) :][: draw.randrange(1, 90)],
            "sampling_params": {
                "temperature": draw.choice([0, 1.3, 2.5]), "top_p": draw.choice([1, 0.8]),
                "top_k": draw.choice([-1, 20]), "frequency_penalty": draw.choice([0, 0.5]), "sampling_seed": index,
                "max_new_tokens": draw.randrange(1, 12), "n": draw.choice([1, 1, 2]),
            },
            "return_logprob": True, "logprob_start_len": draw.choice([-1, 0]), "stream": draw.random() < 0.3,
        }
        for index in range(count)
    ]  # fmt: skip


def answers(server, body):
    reply = server.post("/generate", body, timeout=120)
    assert reply.status == 200, reply.body
    if body["stream"]:
        items = list({event["index"]: event for event in reply.events}.values())
    else:
        items = reply.json if isinstance(reply.json, list) else [reply.json]
    return [(*answer(item), str(item["meta_info"]["input_token_logprobs"])) for item in items]


def test_traffic_changes_nothing(server):
    """Each request alone, then all at once in another order, among clients that go away and nonsense."""
    bodies = requests(24)
    alone = [answers(server, body) for body in bodies]
    server.post("/flush_cache")
    stop = threading.Event()

    def disturb():
        draw = random.Random(1)
        while not stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            sampling = {"max_new_tokens": 90, "ignore_eos": True}
            body = {"text": SENTENCE[: draw.randrange(1, 60)], "sampling_params": sampling, "stream": True}
            connection.request("POST", "/generate", json.dumps(body) if draw.random() < 0.8 else "{")
            if draw.random() < 0.5:
                connection.getresponse().read(20)
            connection.close()

    order = random.Random(2).sample(range(len(bodies)), len(bodies))
    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            together = dict(zip(order, pool.map(lambda index: answers(server, bodies[index]), order), strict=True))
    finally:
        stop.set()
        disturber.join()
    assert [together[index] for index in range(len(bodies))] == alone
    assert server.engine.stats().finished["abort"] > 0
    wait_until(lambda: is_idle(server))


def test_two_servers_give_the_same_bits(server):
    """The second keeps no prefixes, and has served nothing: it is what a server is after a restart."""
    bodies = requests(6, seed=3)
    with serve(prefix_cache=False) as other:
        assert [answers(other, body) for body in bodies] == [answers(server, body) for body in bodies]


def test_a_client_that_goes_away_frees_its_pages(server):
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 190, "n": 2, "ignore_eos": True}}
    for stream in (True, False):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", "/generate", json.dumps(body | {"stream": stream}))
        wait_until(lambda: server.engine.stats().kv_cache_usage > 0)
        connection.close()
        wait_until(lambda: is_idle(server))


def test_new_weights_and_the_old_ones_again(server):
    body = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 4}, "return_logprob": True,
            "stream": False}  # fmt: skip
    before = answers(server, body)
    for version in ("7", "0"):
        reply = server.post("/update_weights_from_disk", {"model_path": version, "weight_version": f"v{version}"})
        assert reply.status == 200
        assert server.get("/get_model_info").json["weight_version"] == f"v{version}"
        assert (answers(server, body) == before) is (version == "0")
    with serve(seed=7) as other:
        server.post("/update_weights_from_disk", {"model_path": "7"})
        assert answers(server, body) == answers(other, body)
    server.post("/update_weights_from_disk", {"model_path": "0"})
    reply = server.post("/update_weights_from_disk", {"model_path": "-1"})
    assert reply.status == 400
    assert reply.error.startswith("model_path: ToyModel: the new weights must have the shape (257, 32), got")
    assert answers(server, body) == before


def test_abort_and_pause(server):
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}, "rid": "mine"}
    assert server.post("/pause_generation").status == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/generate", body)
        wait_until(lambda: server.service.num_running)
        assert server.post("/continue_generation").status == 200
        wait_until(lambda: server.post("/abort_request", {"rid": "mine"}).json["num_aborted"] == 1)
        assert waiting.result().json["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(lambda: is_idle(server))


def test_what_only_the_engine_knows_is_refused_with_a_reason(server):
    assert "the prompt must have at most 199 tokens" in server.post("/generate", {"text": "a" * 300}).error
    reply = server.post("/generate", {"text": "a", "sampling_params": {"logit_bias": {"300": 1}}})
    assert reply.status == 400
    assert "sampling_params.logit_bias: must name tokens from 0 to 256, got 300" in reply.error


def test_a_call_that_was_given_up_does_not_break_the_end(monkeypatch):
    """A client goes away while its call waits for a step that takes long, and the server stops."""
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    held = threading.Event()

    async def main():
        inner = Engine(toy(0), options=EngineOptions(**OPTIONS))

        def step(watched):
            held.wait()
            return []

        monkeypatch.setattr(inner, "step", step)
        engine = AsyncEngine(inner)
        await engine.resume()  # a step comes after it
        waiting = asyncio.create_task(engine.flush_cache())
        await asyncio.sleep(0.05)
        waiting.cancel()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.05)
        held.set()
        await closing
        with pytest.raises(EngineError, match="it was closed"):
            await engine.flush_cache()

    asyncio.run(main())
    assert failed == []
