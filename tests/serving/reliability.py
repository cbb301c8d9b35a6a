"""What `docs/reliability.md` reports: `python -m tests.serving.reliability --requests 10000 --json FILE`.

Random traffic of many requests in engines of this process; servers in processes of their own that are killed and
started again; and a server that gets ten times as many requests as it can take. Everything is compared
with what a request gets alone, bit by bit. The exit code is 0 if nothing differs. `tests/serving/test_reliability.py`
runs a smaller version.
"""

import argparse
import collections
import contextlib
import ctypes
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import save
from bijax.serving import Engine, RequestOutput
from tests.serving.traffic import all_pages_are_back, alone, bits, engine, random_requests

ROOT = Path(__file__).parents[2]
WAYS: dict[str, dict[str, Any]] = {
    "steps dispatched ahead": {"speculative_tokens": 0},
    "speculation": {},
    "speculation, no prefix cache": {"prefix_cache": False},
    "ahead, eight at once": {"speculative_tokens": 0, "max_running": 8, "num_pages": 40, "max_prefill_tokens": 32},
}
KINDS = 4  # how often each request comes, on average
TEXT = "The lighthouse on the northern cape was built in 1871 from granite that had to be shipped across the bay."


def traffic(number: int) -> dict[str, Any]:
    """Random requests in random company, with priorities, aborts, preemptions and page pressure."""
    known: dict[int, bytes] = {}
    requests = random_requests(max(1, number // KINDS), seed=1)
    found: dict[str, Any] = {}
    for way, options in WAYS.items():
        found[way] = _one_traffic(engine(**options), number // len(WAYS), requests, known)
    return found


def _one_traffic(served: Engine, number: int, requests: list[Any], known: dict[int, bytes]) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    counts = collections.Counter({"requests": number, "finished": 0, "aborted": 0, "differing": 0})
    memory: list[int] = []
    added = 0
    live: dict[str, int] = {}
    while added < number or served.has_work:
        for _ in range(min(number - added, int(rng.integers(0, 4))) if len(live) < 40 else 0):
            index = int(rng.integers(len(requests)))
            live[served.add(*requests[index], priority=int(rng.integers(-2, 3)))] = index
            added += 1
            if added % max(1, number // 10) == 0:
                memory.append(_resident_bytes())
        for output in served.step():
            if output.finished:
                index = live.pop(output.request_id)
                if index not in known:
                    known[index] = _digest(alone(*requests[index]))
                counts["finished"] += 1
                counts["differing"] += _digest(output) != known[index]
        if live and rng.random() < 0.01:
            victim = str(rng.choice(list(live)))
            served.abort(victim)
            del live[victim]
            counts["aborted"] += 1
    stats = served.stats()
    return dict(counts) | {
        "preemptions": stats.preemptions,
        "prefix_hits": stats.prefix_hits,
        "generated_tokens": stats.generated_tokens,
        "accepted_drafts": stats.accepted_tokens,
        "pages_returned": all_pages_are_back(served),
        "resident_mib": [round(size / 2**20, 1) for size in memory],
    }


def _digest(output: RequestOutput) -> bytes:
    """Returns a hash of all bits of an output; outputs themselves would be seen in the memory that is measured."""
    return hashlib.blake2b(repr(bits(output)).encode(), digest_size=16).digest()


def _resident_bytes() -> int:
    """Returns the memory of this process, without what the C library has been given back and keeps (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class ServerProcess:
    """A server of the toy model in a process of its own."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.serving.toy_process", json.dumps(options)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        while self.ask("/health")[0] != 200:
            assert self.process.poll() is None, "the server has stopped"
            time.sleep(0.1)

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """Returns status and body of a reply; status 0 if there is none."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(self.url + path, data, timeout=300) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def answer(self, body: Any) -> tuple[int, Any]:
        """Returns the status of a reply to `/generate`, and what must not depend on the company."""
        status, reply = self.ask("/generate", body)
        if status != 200:
            return status, None
        item = json.loads(reply)
        logprobs = [entry[0].hex() for entry in item["meta_info"]["output_token_logprobs"]]
        return status, (item["text"], item["output_ids"], logprobs)

    def gauge(self, name: str) -> float:
        """Returns a number of `/metrics`."""
        lines = self.ask("/metrics")[1].decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def end(self, number: int) -> int:
        """Sends a signal; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def server(**options: Any) -> Iterator[ServerProcess]:
    running = ServerProcess(**options)
    try:
        yield running
    finally:
        running.end(signal.SIGKILL)


def bodies(number: int) -> list[dict[str, Any]]:
    """Returns requests for a server."""
    draw = random.Random(5)
    return [
        {
            "text": TEXT[draw.randrange(30) :][: draw.randrange(1, 70)],
            "sampling_params": {
                "temperature": draw.choice([0, 0.7, 2.0]),
                "max_new_tokens": draw.randrange(1, 40),
                "sampling_seed": index,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        for index in range(number)
    ]


def killed(number: int) -> dict[str, Any]:
    """A server is killed with requests in flight and started again; a second one has other options."""
    requested = bodies(number)
    with server(max_running=4, prefix_cache=False) as second, ThreadPoolExecutor(8) as pool:
        with server() as first:
            alone = [first.answer(body) for body in requested]
            first.ask("/flush_cache", {})
            under_way = [pool.submit(first.answer, body) for body in requested * 3]
            while sum(future.done() for future in under_way) < number // 2:
                time.sleep(0.01)
            code = first.end(signal.SIGKILL)
            statuses = collections.Counter(future.result()[0] for future in under_way)
        with server() as again:
            after = list(pool.map(again.answer, requested))
        on_second = list(pool.map(second.answer, requested))
    return {
        "requests": number,
        "exit_code": code,
        "answered_before_the_kill": statuses[200],
        "lost_by_the_kill": statuses[0],
        "differing_after_the_restart": sum(a != b for a, b in zip(alone, after, strict=True)),
        "differing_on_another_server": sum(a != b for a, b in zip(alone, on_second, strict=True)),
        "refused": sum(status != 200 for status, _ in alone + after + on_second),
    }


def overload(factor: int, *, max_waiting: int) -> dict[str, Any]:
    """Ten times as many requests at once as a server runs and lets wait."""
    most = 0
    stop = threading.Event()
    with server(max_waiting=max_waiting) as busy:
        capacity = max_waiting + 2
        requested = bodies(capacity * factor)
        for body in requested:
            body["sampling_params"]["max_new_tokens"] = 100

        def watch() -> None:
            nonlocal most
            while not stop.is_set():
                most = max(most, int(busy.gauge("num_requests_waiting")))
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(len(requested)) as pool:
                answers = list(pool.map(busy.answer, requested))
        finally:
            stop.set()
            watcher.join()
        statuses = collections.Counter(status for status, _ in answers)
        accepted = [(body, answer) for body, answer in zip(requested, answers, strict=True) if answer[0] == 200]
        differing = sum(busy.answer(body) != answer for body, answer in accepted)
        usage = busy.gauge("kv_cache_usage_perc")
    return {
        "capacity": capacity,
        "requests": len(requested),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "most_waiting": most,
        "max_waiting": max_waiting,
        "accepted_differing": differing,
        "pages_in_use_afterwards": usage,
    }


def wrong(results: dict[str, Any]) -> list[str]:
    """Returns what is not as it should be."""
    found = []
    for way, numbers in results["traffic"].items():
        if numbers["differing"] or not numbers["pages_returned"]:
            found.append(f"traffic, {way}: {numbers['differing']} differ, pages returned: {numbers['pages_returned']}")
        if numbers["finished"] + numbers["aborted"] != numbers["requests"]:
            found.append(f"traffic, {way}: {numbers}")
    kill, load = results["kill"], results["overload"]
    if kill["differing_after_the_restart"] or kill["differing_on_another_server"] or kill["refused"]:
        found.append(f"kill: {kill}")
    if set(load["statuses"]) != {"200", "429"} or load["accepted_differing"] or load["pages_in_use_afterwards"]:
        found.append(f"overload: {load}")
    if load["most_waiting"] > load["max_waiting"]:
        found.append(f"overload: {load}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="of the random traffic")
    parser.add_argument("--server-requests", type=int, default=100, help="to the servers that are killed")
    parser.add_argument("--max-waiting", type=int, default=16, help="queue of the overloaded server")
    parser.add_argument("--json", type=Path, default=None, help="file or folder for the figures")
    parsed = parser.parse_args(argv)
    more: dict[str, Any] = {"python": platform.python_version(), "numpy": importlib.metadata.version("numpy")}
    more["load"] = os.getloadavg()[0]
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name, part in (
        ("traffic", lambda: traffic(parsed.requests)),
        ("kill", lambda: killed(parsed.server_requests)),
        ("overload", lambda: overload(10, max_waiting=parsed.max_waiting)),
    ):
        start = time.monotonic()
        results[name] = part()
        seconds[name] = round(time.monotonic() - start, 1)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    if parsed.json is not None:
        save("reliability", cells(results), parsed.json, **more, seconds=seconds)
    found = wrong(results)
    print("\n".join(found) or "nothing differs")
    return int(bool(found))


def cells(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the cells of the file of results."""
    ways = [{"what": "traffic", "engine": way, **numbers} for way, numbers in results["traffic"].items()]
    return [*ways, *({"what": name, **results[name]} for name in ("kill", "overload"))]


if __name__ == "__main__":
    sys.exit(main())
