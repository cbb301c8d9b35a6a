"""A server on a socket of the loopback, in a thread of this process."""

import contextlib
import http.client
import json
import threading
import time

from bijax.server.model import ServedModel
from bijax.server.options import ServerOptions
from bijax.server.run import Server, listen
from bijax.server.service import Phase, Service
from tests.serving.fake_engine import LONGEST, VOCABULARY, ByteTokenizer, FakeEngine

LONG = {"text": "a", "sampling_params": {"max_new_tokens": 4000}}
SHORT = {"text": "a", "sampling_params": {"temperature": 0, "max_new_tokens": 2}}


class Reply:
    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]["message"]

    @property
    def events(self):
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Live:
    """A running server and a client for it."""

    def __init__(self, service):
        self.service = service
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(service)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)

    @property
    def engine(self):
        return self.service.generation(draining=True).engine

    def request(self, method, path, body=None, headers=(), timeout=20):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            data = json.dumps(body).encode() if isinstance(body, dict | list) else body
            connection.request(method, path, data, dict(headers))
            return Reply(connection.getresponse())

    def get(self, path, **more):
        return self.request("GET", path, **more)

    def post(self, path, body=None, **more):
        return self.request("POST", path, {} if body is None else body, **more)

    def generate(self, **body):
        reply = self.post("/generate", body)
        assert reply.status == 200, reply.body
        return reply.json


def begin(server, body, path="/generate"):
    """Sends a request and does not wait for the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("POST", path, json.dumps(body))
    return connection


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextlib.contextmanager
def live(
    engine=None,
    *,
    tokenizer=None,
    load_weights=None,
    open_engine=None,
    engine_options=None,
    longest=LONGEST,
    adapters=None,
    wait=True,
    **options,
):
    """Serves an engine, the fake one by default; `engine` holds its arguments."""

    async def open_fake():
        return FakeEngine(**(engine or {}))

    model = ServedModel(
        "fake", "/models/fake", VOCABULARY, longest, ByteTokenizer() if tokenizer is None else tokenizer, load_weights,
        adapters or {},
    )  # fmt: skip
    service = Service(model, ServerOptions(port=0, **options), open_engine or open_fake, engine_options)
    running = Live(service)
    running.thread.start()
    try:
        if wait:
            wait_until(lambda: service.phase is not Phase.STARTING)
        yield running
    finally:
        running.server.should_exit = True
        running.thread.join(20)
        running.listener.close()
        assert not running.thread.is_alive()
