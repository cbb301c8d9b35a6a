"""The page at `/`, in headless Chromium: the proof with an engine that keeps its bits, and with one that does not."""

import dataclasses
import hashlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.live import live

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH")


class Moody(FakeEngine):
    """The control: log-probabilities follow the number of requests that run."""

    def _step(self, prompt, output, params, request_id):
        made = super()._step(prompt, output, params, request_id)
        if not made.logprobs or self.running < 4:
            return made
        last = made.logprobs[-1]
        changed = dataclasses.replace(last, logprob=float(np.nextafter(np.float32(last.logprob), np.float32(0))))
        return dataclasses.replace(made, logprobs=(*made.logprobs[:-1], changed))


async def moody():
    return Moody(step_s=0.01, max_running=32)


def dom(url, tmp_path):
    """The document after its scripts, and what the browser logged."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    where = [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom", url]
    command = [CHROMIUM, *flags, *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_page_loads_nothing_from_elsewhere():
    with live() as server:
        page = server.get("/").body.decode()
    assert "<title>bijax serve</title>" in page
    assert not re.search(r"(src|href)\s*=\s*.?(https?:)?//|@import|url\(", page)


@needs_chromium
def test_the_proof(tmp_path):
    with live({"step_s": 0.005, "max_running": 32}) as server, live(open_engine=moody, allowed_origins="*") as other:
        server.service.fingerprint = "0123"
        html, log = dom(f"{server.url}/?prove&tokens=6&prompt=Hi&other={other.url}", tmp_path)
        same = server.generate(
            text="<user>Hi<assistant>", sampling_params={"max_new_tokens": 6, "temperature": 0.7, "sampling_seed": 42},
            return_logprob=True,
        )  # fmt: skip
    assert "4 of 4 equal, to the last bit. The other server gave two answers." in html
    assert "fp_0123-default" in html
    bits = np.array([entry[0] for entry in same["meta_info"]["output_token_logprobs"]], np.float32)
    hashes = re.findall('data-hash="([0-9a-f]{64})"', html)
    assert hashes[:4] == [hashlib.sha256(bits.tobytes()).hexdigest()] * 4
    assert len(set(hashes[4:])) == 2
    assert html.count("same bits") >= 3
    assert "Uncaught" not in log


@needs_chromium
@pytest.mark.tier("full")
def test_the_proof_fails_where_bits_differ(tmp_path):
    with live(open_engine=moody) as server:
        html, _ = dom(f"{server.url}/?prove&tokens=6&prompt=Hi", tmp_path)
    assert "1 of 3 answers differ in bits." in html
