"""Abort, pause, flush, weights, metrics, names of requests."""

import json
import logging
import re
import socket
import time

import pytest

from tests.serving.live import LONG, SHORT, begin, live, wait_until


@pytest.fixture(scope="module")
def server():
    with live({"step_s": 0.002}, load_weights=_load_weights) as running:
        yield running


def _load_weights(path):
    if path == "/nowhere":
        raise FileNotFoundError("there is no checkpoint at /nowhere")
    if path == "/other":
        raise ValueError("the checkpoint has 2 layers, the model 30")
    return {"path": path}


def test_request_ids_and_the_log(server, caplog):
    with caplog.at_level(logging.INFO, "bijax.server.access"):
        named = server.post("/generate", SHORT, headers={"X-Request-Id": "mine-7"})
        other = server.get("/health", headers={"X-Request-Id": "not printable \x01"[:5] + "ä"})
        chat = server.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "mine-8"})
    assert named.headers["x-request-id"] == "mine-7"
    assert re.fullmatch("[0-9a-f]{32}", other.headers["x-request-id"])
    assert chat.json["id"] == "cmpl-mine-8"
    records = {record.request_id: record for record in caplog.records}
    record = records["mine-7"]
    assert (record.method, record.path, record.status) == ("POST", "/generate", 200)
    assert record.duration_s > 0


def test_unknown_places_and_methods(server):
    for method, path, status in [("GET", "/nowhere", 404), ("GET", "/generate", 405), ("PUT", "/health", 405)]:
        reply = server.request(method, path)
        assert reply.status == status
        assert path in reply.error


def test_abort(server):
    connections = [begin(server, LONG | {"rid": name}) for name in ("one", "two", "two")]
    wait_until(lambda: server.engine.running == 3)
    assert server.post("/abort_request", {"rid": "three"}).json["num_aborted"] == 0
    assert server.post("/abort_request", {"rid": "two"}).json["num_aborted"] == 2
    for connection in connections[1:]:
        info = json.loads(connection.getresponse().read())["meta_info"]
        assert info["finish_reason"]["type"] == "abort"
        assert info["id"] == "two"
    assert server.engine.running == 1
    assert server.post("/abort_request", {"abort_all": True}).json["num_aborted"] == 1
    assert json.loads(connections[0].getresponse().read())["meta_info"]["finish_reason"]["type"] == "abort"
    for body in ({}, {"rid": "a", "abort_all": True}, {"rid": 1}, {"id": "a"}):
        assert server.post("/abort_request", body).status == 400
    for connection in connections:
        connection.close()


def test_pause_and_continue(server):
    assert server.post("/pause_generation").status == 200
    waiting = begin(server, SHORT)
    wait_until(lambda: server.engine.running)
    time.sleep(0.05)
    assert server.engine.running == 1
    assert server.get("/health").status == 200
    assert server.post("/continue_generation").status == 200
    assert json.loads(waiting.getresponse().read())["meta_info"]["finish_reason"]["type"] == "length"
    waiting.close()
    ended = begin(server, LONG)
    wait_until(lambda: server.engine.running)
    assert server.post("/pause_generation", {"mode": "abort"}).status == 200
    assert server.post("/continue_generation", {}).status == 200
    assert json.loads(ended.getresponse().read())["meta_info"]["finish_reason"]["type"] == "abort"
    ended.close()
    assert server.post("/pause_generation", {"mode": "sideways"}).status == 400


def test_flush(server):
    before = server.engine.flushed
    assert server.post("/flush_cache").status == server.get("/flush_cache").status == 200
    assert server.engine.flushed == before + 2
    running = begin(server, {"text": "a", "sampling_params": {"max_new_tokens": 50}})
    wait_until(lambda: server.service.num_running)
    assert server.post("/flush_cache?timeout=10").status == 200
    assert server.service.num_running == 0
    running.close()
    for value in ("-1", "x", "nan", "1e9"):
        assert server.post(f"/flush_cache?timeout={value}").error.startswith("timeout: must be from 0 to 3600 seconds")


def test_weights(server):
    update = {"model_path": "/weights/7", "weight_version": "step-7"}
    reply = server.post("/update_weights_from_disk", update)
    assert reply.json["success"]
    assert server.generate(**SHORT)["meta_info"]["weight_version"] == "step-7"
    assert server.get("/get_model_info").json["weight_version"] == "step-7"
    for path, message in [("/nowhere", "there is no checkpoint"), ("/other", "the checkpoint has 2 layers")]:
        reply = server.post("/update_weights_from_disk", {"model_path": path})
        assert reply.status == 400
        assert reply.error.startswith(f"model_path: {message}")
    assert server.generate(**SHORT)["meta_info"]["weight_version"] == "step-7"


def test_model_info(server):
    info = server.get("/get_model_info").json
    assert (info["model_path"], info["is_generation"], info["max_model_len"]) == ("/models/fake", True, 4096)


def test_metrics(server):
    server.generate(**SHORT)
    text = server.get("/metrics").body.decode()
    for line in (
        'vllm:num_requests_running{model_name="fake"} 0.0',
        'vllm:num_requests_waiting{model_name="fake"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="fake"} 0.0',
        'vllm:prefix_cache_queries_total{model_name="fake"} 10.0',
        'vllm:prefix_cache_hits_total{model_name="fake"} 5.0',
    ):
        assert f"\n{line}\n" in text
    for sample in (
        'request_success_total{finished_reason="length",model_name="fake"}',
        'time_to_first_token_seconds_count{model_name="fake"}',
        'inter_token_latency_seconds_count{model_name="fake"}',
        'e2e_request_latency_seconds_count{model_name="fake"}',
        'generation_tokens_total{model_name="fake"}',
    ):
        [line] = [line for line in text.splitlines() if line.startswith(f"vllm:{sample} ")]
        assert float(line.split()[-1]) > 0


def test_what_is_no_http(server):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"NONSENSE\r\n\r\n")
        assert b" 400 " in raw.recv(1000)


def test_no_logging_is_set_up(server):
    assert server.get("/health").status == 200
    assert all(logging.getLogger(name).handlers == [] for name in ("bijax.server", "uvicorn", "uvicorn.error"))
