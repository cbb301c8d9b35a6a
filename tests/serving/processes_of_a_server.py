"""Starts `bijax serve` in one process or two that serve one model, and asks it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_devices import ROOT, free_port

SMALL = "--page-size 4 --num-pages 16 --max-running 1 --max-prefill-tokens 1 --max-length 16 --skip-tokenizer-init"
ASKED = {
    "input_ids": [1, 5, 9],
    "sampling_params": {"max_new_tokens": 3, "temperature": 1, "sampling_seed": 3},
    "return_logprob": True,
}
TIMEOUT_S = 600
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextlib.contextmanager
def serving(
    *models: Path, flags: str = "", gpus: list[list[str]] | None = None
) -> Iterator[tuple[int, list[subprocess.Popen[str]]]]:
    """Starts a process for each model, on devices of a CPU or these GPUs; yields the port and the processes."""
    port, meeting, processes = free_port(), free_port(), len(models)
    fake = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}"}
    own = [
        fake if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i]), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for i in range(processes)
    ]
    over = f"--nnodes {processes} --dist-init-addr 127.0.0.1:{meeting}" if processes > 1 else ""
    command = [sys.executable, "-m", "bijax", "serve", *SMALL.split(), *flags.split(), "--tensor-parallel-size", "2"]
    command += over.split()
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(
            [*command, "--model", str(model), "--port", str(port), *(["--node-rank", str(number)] if over else [])],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": PATHS, **own[number]}, **pipes,
        )
        for number, model in enumerate(models)
    ]  # fmt: skip
    try:
        yield port, started
    finally:
        for process in started:
            process.kill()


def answer(port: int, process: subprocess.Popen[str], **more: Any) -> Any:
    """Waits until a server is ready; returns the tokens and log-probabilities of a request with `more` fields."""
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
            break
        time.sleep(0.5)
    with urllib.request.urlopen(f"{url}/generate", json.dumps(ASKED | more).encode(), timeout=TIMEOUT_S) as reply:
        found = json.load(reply)
    given = json.dumps({"model_path": "elsewhere"}).encode()
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(f"{url}/update_weights_from_disk", given, timeout=60)
    return [entry[:2] for entry in found["meta_info"]["output_token_logprobs"]]
