"""Servers in processes of their own: signals, kill -9, the whole command."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.layers import checkpoint_files
from tests.serving.determinism_client import Client
from tests.tiers import full_only

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def started(*command):
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_requests_finish():
    """In a process of its own, since signals reach the main thread alone."""
    replies = []
    with started("tests.serving.served_process", "0.02") as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/generate"
        body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 30}, "stream": True}).encode()
        begun = threading.Event()

        def ask():
            with urllib.request.urlopen(url, body, timeout=60) as reply:
                replies.append(reply.readline())
                begun.set()
                replies.extend(reply)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(60)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
        asking.join()
    assert process.returncode == 0
    assert replies[-2] == b"data: [DONE]\n"
    lines = [json.loads(line) for line in log.splitlines()]
    assert any(line["message"].startswith("draining: 1 open request") for line in lines)
    [access] = [line for line in lines if line.get("path") == "/generate"]
    assert (access["status"], access["method"], access["logger"]) == (200, "POST", "bijax.server.access")


@contextlib.contextmanager
def served(path, *options):
    """`bijax serve` with a tiny checkpoint; yields its process and address once it is ready."""
    # Two shapes, because each is compiled.
    small = ("--port", "0", "--page-size", "8", "--num-pages", "32", "--max-running", "1", "--max-prefill-tokens", "16")
    with started("bijax", "serve", "--model", str(path), "--log-format", "json", *small, *options) as process:
        first = json.loads(process.stderr.readline())["message"]
        if first.startswith("no tokenizer"):
            first = json.loads(process.stderr.readline())["message"]
        url = first[first.index("http://") :]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/health", timeout=30):
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process, url


def checkpoint(path):
    return checkpoint_files.write_gguf(path / "tiny.gguf", checkpoint_files.gguf_metadata())


def answers(url):
    client = Client(url, max_new_tokens=6, temperature=1.5)
    return client.answers(["abc ab", "123", "abc abc 12"])


# Plain operations compile in half the time; test_server_engine.py serves those of bijax.
@pytest.mark.parametrize(
    "options", [["--no-enable-deterministic-inference"], full_only([])], ids=["plain", "invariant"]
)
def test_the_command_serves_a_checkpoint(options, tmp_path):
    with served(checkpoint(tmp_path), "--served-model-name", "tiny", *options) as (process, url):
        first = answers(url)
        assert first == answers(url)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            assert json.loads(reply.read())["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.tier("full")
def test_a_checkpoint_without_a_tokenizer(tmp_path):
    metadata = checkpoint_files.gguf_metadata() | {"tokenizer.ggml.model": "llama"}
    path = checkpoint_files.write_gguf(tmp_path / "tiny.gguf", metadata)
    with started("bijax", "serve", "--model", str(path), "--port", "0") as process:
        _, log = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "or load it without its tokenizer" in log
    with served(path, "--skip-tokenizer-init") as (_, url):
        body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
        with urllib.request.urlopen(f"{url}/generate", json.dumps(body).encode(), timeout=60) as reply:
            assert len(json.loads(reply.read())["output_ids"]) == 3
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"{url}/generate", b'{"text": "abc"}', timeout=60)


@pytest.mark.tier("full")
def test_the_same_bits_after_kill_9(tmp_path):
    path = checkpoint(tmp_path)
    with served(path) as (process, url):
        first = answers(url)
        process.kill()
        process.wait(30)
    with served(path, "--no-prefix-cache", "--speculative-tokens", "3") as (_, url):
        assert answers(url) == first


@pytest.mark.tier("full")
def test_sigterm_while_the_engine_starts(tmp_path):
    with started("bijax", "serve", "--model", str(checkpoint(tmp_path)), "--port", "0") as process:
        line = process.stderr.readline()
        url = line[line.index("http://") :].strip()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health", timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read().rstrip().endswith("stopped")
