"""Starting, draining, limits, the key, clients that go away, faults."""

import asyncio
import contextlib
import http.client
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bijax.server.service import Phase
from tests.serving.fake_engine import FakeEngine
from tests.serving.live import LONG, SHORT, begin, live, wait_until


def test_health_says_503_while_the_engine_starts():
    gate = threading.Event()

    async def open_slowly():
        await asyncio.to_thread(gate.wait)
        return FakeEngine()

    with live(open_engine=open_slowly, wait=False, retry_after=7) as server, contextlib.ExitStack() as last:
        last.callback(gate.set)
        for method, path in [("GET", "/health"), ("GET", "/health_generate"), ("POST", "/generate")]:
            reply = server.request(method, path, json.dumps(SHORT).encode())
            assert reply.status == 503
            assert reply.headers["retry-after"] == "7"
            assert "starting" in reply.error
        assert server.get("/metrics").status == server.get("/v1/models").status == 200
        gate.set()
        wait_until(lambda: server.get("/health").status == 200)
        assert server.get("/health_generate").status == 200
        assert server.generate(**SHORT)["meta_info"]["completion_tokens"] == 2
    assert server.service.phase is Phase.READY


def test_an_engine_that_does_not_start_stops_the_server(caplog):
    async def broken():
        raise ValueError("no pages fit into the memory")

    with caplog.at_level(logging.ERROR, "bijax.server"), live(open_engine=broken) as server:
        server.thread.join(10)
    assert server.service.phase is Phase.FAILED
    assert "no pages fit into the memory" in caplog.text


def test_draining_finishes_what_runs_and_takes_no_more():
    with live({"step_s": 0.02}, retry_after=3) as server:
        running = begin(server, {"text": "a", "sampling_params": {"max_new_tokens": 40}})
        wait_until(lambda: server.service.num_running)
        server.server.handle_exit(15, None)
        wait_until(lambda: server.service.phase is Phase.DRAINING)
        for reply in (server.get("/health"), server.post("/generate", SHORT)):
            assert reply.status == 503
            assert "draining" in reply.error
            assert reply.headers["retry-after"] == "3"
        reply = running.getresponse()
        assert json.loads(reply.read())["meta_info"]["completion_tokens"] == 40
        running.close()
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert server.service._generation.engine.closed


def test_draining_ends_after_its_time():
    with live({"step_s": 0.05}, drain_timeout=0.2) as server:
        running = begin(server, LONG)
        wait_until(lambda: server.service.num_running)
        server.server.handle_exit(15, None)
        server.thread.join(10)
        assert not server.thread.is_alive()
        running.close()
    assert server.service._generation.engine.running == 0


def test_a_second_signal_stops_at_once():
    with live({"step_s": 0.05}, drain_timeout=1000) as server:
        running = begin(server, LONG)
        wait_until(lambda: server.service.num_running)
        server.server.handle_exit(15, None)
        wait_until(lambda: server.service.phase is Phase.DRAINING)
        server.server.handle_exit(15, None)
        server.thread.join(10)
        assert not server.thread.is_alive()
        running.close()


@pytest.fixture(scope="module")
def server():
    with live({"step_s": 0.002}) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_goes_away_frees_its_pages(server, path, stream):
    body = LONG if path == "/generate" else {"prompt": ["a", "b"], "max_tokens": 4000, "n": 2}
    connections = [begin(server, body | {"stream": stream}, path) for _ in range(3)]
    wait_until(lambda: server.engine.running >= 3)
    if stream:
        assert connections[0].getresponse().read(5) == b"data:"
    for connection in connections:
        connection.close()
    wait_until(lambda: server.engine.running == server.engine.waiting == server.service.num_running == 0)


def test_a_client_that_does_not_read_does_not_hold_its_pages():
    with live() as server:
        connection = begin(server, {"text": "a", "sampling_params": {"max_new_tokens": 1500}, "stream": True})
        wait_until(lambda: server.engine.finished["length"])
        wait_until(lambda: server.engine.running == server.service.num_running == 0)
        assert b"[DONE]" in connection.getresponse().read()
        connection.close()


def test_overload_is_refused_and_what_was_accepted_is_served():
    """Ten times as many requests as there are places: the queue stays within its bound."""
    engine = {"step_s": 0.003, "max_running": 4, "max_waiting": 4}
    body = {"text": "same", "sampling_params": {"temperature": 0, "max_new_tokens": 10}, "return_logprob": True}
    with live(engine) as server:
        [alone] = server.generate(**body | {"text": ["same"]})
        with ThreadPoolExecutor(80) as pool:
            replies = list(pool.map(lambda _: server.post("/generate", body), range(80)))
        accepted = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status != 200]
        assert len(accepted) >= 8
        assert refused
        assert {(reply.status, reply.headers["retry-after"]) for reply in refused} == {(429, "1")}
        assert {reply.json["error"]["type"] for reply in refused} == {"rate_limit_error"}
        for reply in accepted:
            assert reply.json["output_ids"] == alone["output_ids"]
            logprobs = reply.json["meta_info"]["output_token_logprobs"]
            assert logprobs == alone["meta_info"]["output_token_logprobs"]
        assert server.engine.most_waiting <= 4
        wait_until(lambda: server.engine.running == server.engine.waiting == server.service.num_running == 0)


def test_a_list_that_does_not_fit_is_refused_as_a_whole():
    with live({"step_s": 0.01, "max_running": 1, "max_waiting": 2}) as server:
        reply = server.post("/generate", LONG | {"text": ["a"] * 9})
        assert reply.status == 429
        wait_until(lambda: server.engine.running == server.engine.waiting == server.service.num_running == 0)


def test_limits_on_what_is_sent():
    limits = {"max_request_bytes": 1000, "max_header_bytes": 4096, "max_prompts": 3, "max_prompt_tokens": 20,
              "max_output_tokens": 5, "body_timeout": 0.3}  # fmt: skip
    with live(**limits) as server:
        for reply in (
            server.post("/generate", {"text": "a" * 1000}),
            server.request("POST", "/generate", iter([b'{"text": "', b"a" * 1000])),  # without a length
        ):
            assert reply.status == 413
            assert reply.error == "the body must have at most 1000 bytes"
        assert server.get("/health", headers={"x": "a" * 5000}).status == 431
        assert server.get("/health?" + "a" * 5000).status == 431
        for body, message in [
            ({"text": ["a"] * 4}, "text: the request asks for 4 outputs (prompts times n), at most 3 are taken"),
            (
                {"text": "a" * 21, "sampling_params": {"max_new_tokens": 5}},
                "text: the prompt has 21 tokens, at most 20 are taken",
            ),
            (LONG, "sampling_params.max_new_tokens: the request asks for outputs of 4000 tokens, at most 5 are taken"),
        ]:
            assert server.post("/generate", body).error == message
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert server.post("/v1/chat/completions", chat).json["usage"]["completion_tokens"] == 5
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.putrequest("POST", "/generate")
        connection.putheader("Content-Length", "500")
        connection.endheaders(b'{"text"')
        assert connection.getresponse().status == 408
        connection.close()


def test_more_requests_than_may_be_open():
    with live({"step_s": 0.02}, max_open_requests=2) as server:
        connections = [begin(server, LONG) for _ in range(2)]
        wait_until(lambda: server.engine.running == 2)
        reply = server.post("/generate", SHORT)
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert server.get("/health").status == server.get("/metrics").status == 200
        for connection in connections:
            connection.close()


def test_the_key():
    with live(api_key="secret") as server:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer"}):
            reply = server.post("/generate", SHORT, headers=header)
            assert reply.status == 401
            assert "secret" not in reply.error
        assert server.get("/v1/models").status == 401
        assert server.post("/generate", SHORT, headers={"Authorization": "Bearer secret"}).status == 200
        assert server.get("/health").status == server.get("/metrics").status == 200


def test_an_error_of_the_server_is_not_the_clients(caplog):
    """A fault in the server is logged with the request's name, and answered with what kind it is, no more."""

    class Broken(FakeEngine):
        async def flush_cache(self):
            raise KeyError("a secret of the server")

        def _step(self, prompt, output, params, request_id):
            if output.tokens:
                raise KeyError("a secret of the server")
            return super()._step(prompt, output, params, request_id)

    async def open_broken():
        return Broken()

    with live(open_engine=open_broken) as server:
        reply = server.post("/flush_cache", headers={"X-Request-Id": "broken-1"})
        assert (reply.status, reply.error) == (500, "an error of the server: KeyError")
        assert reply.headers["x-request-id"] == "broken-1"
        reply = server.post("/generate", SHORT)
        assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
        with contextlib.suppress(http.client.IncompleteRead):
            server.post("/generate", SHORT | {"stream": True})
        assert server.get("/health").status == 200
        wait_until(lambda: server.engine.running == server.service.num_running == 0)
    errors = [record for record in caplog.records if record.exc_info]
    assert [record.name for record in errors if record.name.startswith("bijax")] == ["bijax.server.access"] * 3
    assert errors[0].request_id == "broken-1"
