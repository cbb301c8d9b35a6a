"""Malformed requests: always a 4xx with a reason, and never a change in what others get."""

import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.live import live

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions", "/abort_request", "/pause_generation",
         "/update_weights_from_disk")  # fmt: skip
FIELDS = ("text", "input_ids", "sampling_params", "stream", "rid", "prompt", "messages", "model", "n", "seed", "stop",
          "max_tokens", "logprobs", "logit_bias", "stream_options", "top_p", "temperature", "return_logprob",
          "logprob_start_len", "mode", "model_path", "priority", "max_new_tokens", "role", "content")  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(-3, 300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), inner),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
WATCHED = {"text": "watched", "sampling_params": {"temperature": 0, "max_new_tokens": 6}, "return_logprob": True}


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


@pytest.fixture(scope="module")
def alone(server):
    return watched(server)


def watched(server):
    reply = server.generate(**WATCHED)
    return reply["output_ids"], reply["meta_info"]["output_token_logprobs"]


def check(server, reply):
    """A reply to what may be valid by chance is 200; an error is the client's, has a reason, and is not long."""
    assert reply.status == 200 or 400 <= reply.status < 500, reply.body
    if reply.status != 200:
        assert reply.error
        assert len(reply.error) < 1000


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=BODIES)
def test_json_of_any_shape(server, path, body):
    check(server, server.request("POST", path, json.dumps(body).encode()))
    if path == "/pause_generation":
        server.post("/continue_generation")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=st.binary(min_size=1, max_size=60))
def test_bytes_of_any_kind(server, path, body):
    reply = server.request("POST", path, body)
    if (path, reply.status) == ("/pause_generation", 200):  # of {}
        server.post("/continue_generation")
    else:
        assert reply.status == 400
        assert reply.error


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_valid_request_with_one_wrong_value_names_the_field(server, data):
    """Each field of a valid request in turn is given what it does not take."""
    valid = {"text": "a", "sampling_params": {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "n": 1,
             "max_new_tokens": 2, "sampling_seed": 1, "stop_token_ids": [1], "ignore_eos": True}}  # fmt: skip
    field = data.draw(st.sampled_from(sorted(valid["sampling_params"])))
    wrong = data.draw(st.sampled_from(["x", {}, [{}], 1e300, -(2**70), float("nan")]))
    reply = server.post("/generate", {**valid, "sampling_params": valid["sampling_params"] | {field: wrong}})
    if reply.status == 200:  # 1e300 is a temperature
        assert (field, wrong) == ("temperature", 1e300)
    else:
        assert reply.status == 400
        assert reply.error.startswith(f"sampling_params.{field}")


def raw(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"POST /generate\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=range(10),
)
def test_broken_http(server, data):
    received = raw(server, data)
    assert received == b"" or received.startswith(b"HTTP/1.1 4"), received[:100]


def test_nothing_of_it_changed_what_others_get(server, alone):
    for body in (b"{", b'{"text": 1}', b'{"text": "a", "sampling_params": {"top_p": 7}}'):
        assert server.request("POST", "/generate", body).status == 400
    assert watched(server) == alone
    assert server.engine.running == server.engine.waiting == server.service.num_running == 0
