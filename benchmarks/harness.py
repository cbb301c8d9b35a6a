"""What every benchmark shares: fair timing of two programs, the project's JSON form, the table."""

import argparse
import datetime
import json
import math
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def interleaved_us(
    calls: Sequence[Callable[[], Any]],
    *,
    seconds: float = 0.6,
    rounds: int = 7,
    settle: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the time of each call in microseconds: the median over rounds of each round's best.

    Calls take turns in every round, so that a change of the machine's speed meets all of them, and each round has
    another order; the best of a round leaves out what other processes took.

    Args:
        calls: What is timed.
        seconds: How long all of it takes about, without `settle`.
        rounds: Turns of each call.
        settle: Seconds that a call runs in its turn before it is timed. A GPU at its power limit sets its clock by what
            it did in the last half second: without this a program behind a frugal one seems faster.
        clock: `time.process_time` counts the threads of this process.
    """
    for call in calls:
        jax.block_until_ready(call())
    slowest = max(_once(call, clock) for call in calls)
    repeats = max(3, min(200, int(seconds / rounds / max(slowest, 1e-6) / len(calls))))
    best: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(rounds):
        for index in order.sample(range(len(calls)), len(calls)):
            end = time.perf_counter() + settle
            while time.perf_counter() < end:
                jax.block_until_ready(calls[index]())
            best[index].append(min(_once(calls[index], clock) for _ in range(repeats)))
    return [statistics.median(times) * 1e6 for times in best]


def queued_us(calls: Sequence[Callable[[], Any]], *, repeats: int = 40, rounds: int = 7) -> list[float]:
    """Returns the time of each call in microseconds where it is not waited for before the next one.

    What a loop sees whose steps take each other's results: the device works without a pause, if the host keeps up.
    The median over rounds, in each of which the calls take turns in another order.

    Args:
        calls: What is timed.
        repeats: How often a call is made in its turn.
        rounds: Turns of each call.
    """
    found: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(rounds):
        for index in order.sample(range(len(calls)), len(calls)):
            jax.block_until_ready(calls[index]())
            start = time.perf_counter()
            for _ in range(repeats):
                last = calls[index]()
            jax.block_until_ready(last)
            found[index].append((time.perf_counter() - start) / repeats)
    return [statistics.median(times) * 1e6 for times in found]


def _once(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    jax.block_until_ready(call())
    return clock() - start


def device_name() -> str:
    """Returns a name for file names and tables: 'h200', or the processor of the CPU."""
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "gpu":
        return kind.split()[-1].lower()
    return "cpu"


def device_words() -> str:
    if jax.default_backend() == "gpu":
        return str(jax.devices()[0].device_kind)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} cores" if names else model
    return model


def commit() -> str:
    result = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def record(benchmark: str, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the project's JSON object of one benchmark; `ratio` is XLA's time over ours."""
    ratios = [cell["ratio"] for cell in cells]
    return {
        "benchmark": benchmark,
        "device": device_words(),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "cells": list(cells),
        "geomean": round(math.exp(statistics.fmean(math.log(r) for r in ratios)), 3),
        "worst": round(min(ratios), 3),
    }


def cell(ours_us: float, xla_us: float, **shape: Any) -> dict[str, Any]:
    return {**shape, "ours_us": round(ours_us, 2), "xla_us": round(xla_us, 2), "ratio": round(xla_us / ours_us, 3)}


def write(result: dict[str, Any], path: Path | None = None) -> Path:
    path = path or RESULTS / f"{result['benchmark']}_{device_name()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(c) for c in result["cells"])
    head = json.dumps({k: v for k, v in result.items() if k not in ("cells", "geomean", "worst")})
    path.write_text(
        f'{head[:-1]}, "cells": [\n  {rows}\n], "geomean": {result["geomean"]}, "worst": {result["worst"]}}}\n'
    )
    return path


def show(result: dict[str, Any]) -> None:
    columns = list(result["cells"][0])
    table = Table(title=f"{result['benchmark']} on {result['device']}, jax {result['jax']}, {result['date']}")
    for name in columns:
        table.add_column(name, justify="right")
    for row in result["cells"]:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    console = Console()
    console.print(table)
    console.print(f"ratio = XLA's time / ours. geometric mean {result['geomean']}, worst {result['worst']}")


def run(benchmark: str, cases: Sequence[Any], measure: Callable[[Any], dict[str, Any]]) -> None:
    """Measures all cases with a progress bar, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=f"Benchmark {benchmark}.")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: benchmarks/results)")
    arguments = parser.parse_args()
    cells = [measure(case) for case in track(cases, description=benchmark, console=Console(stderr=True))]
    result = record(benchmark, cells)
    show(result)
    print(f"written to {write(result, arguments.json)}")
