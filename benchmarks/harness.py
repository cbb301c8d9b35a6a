"""Shared by all benchmarks: timing of programs against each other, the state of a run, writing results."""

import argparse
import datetime
import functools
import importlib.metadata
import platform
import random
import re
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

from benchmarks import record


def interleaved_us(
    calls: Sequence[Callable[[], Any]],
    *,
    seconds: float = 0.6,
    rounds: int = 7,
    settle: float = 0.0,
) -> list[float]:
    """Returns the time of each call in microseconds: the median over rounds of each round's best.

    The calls alternate in every round, so that a change of the machine's speed affects all of them, in a different
    order in each round; the best of a round leaves out the time of other processes.

    Args:
        calls: What is timed.
        seconds: How long all of it takes about, without `settle`.
        rounds: Number of rounds.
        settle: Seconds that a call runs in each round before it is timed. A GPU at its power limit sets its clock by
            the load of the last half second: without this a program after a frugal one seems faster.
    """
    repeats = _repeats(calls, seconds / rounds)

    def best(call: Callable[[], Any]) -> float:
        end = time.perf_counter() + settle
        while time.perf_counter() < end:
            jax.block_until_ready(call())
        return min(_once(call) for _ in range(repeats))

    return _medians_us(calls, rounds, best)


def processor_us(calls: Sequence[Callable[[], Any]], *, seconds: float = 0.6, rounds: int = 7) -> list[float]:
    """Returns the processor time of each call in microseconds: the median over rounds of each round's mean.

    It counts all threads of the process. The system may add the time of threads that are running at its ticks only,
    some milliseconds apart, so a short call alone may seem to take a tenth of its time: a round has many ticks.

    Args:
        calls: What is timed, alternately.
        seconds: How long all of it takes about.
        rounds: Number of rounds.
    """
    repeats = _repeats(calls, seconds / rounds, most=100_000)

    def mean(call: Callable[[], Any]) -> float:
        start = time.process_time()
        for _ in range(repeats):
            jax.block_until_ready(call())
        return (time.process_time() - start) / repeats

    return _medians_us(calls, rounds, mean)


def _repeats(calls: Sequence[Callable[[], Any]], seconds: float, most: int = 200) -> int:
    """Returns how often each call is made in so many seconds, after it was made once."""
    for call in calls:
        jax.block_until_ready(call())
    slowest = max(_once(call) for call in calls)
    return max(3, min(most, int(seconds / max(slowest, 1e-6) / len(calls))))


def queued_us(calls: Sequence[Callable[[], Any]], *, repeats: int = 40, rounds: int = 7) -> list[float]:
    """Returns the time of each call in microseconds where the next one does not wait for it.

    This is the time of a loop whose steps take each other's results: the device works without a pause if the host
    keeps up. The median over rounds, each with the calls in a different order.

    Args:
        calls: What is timed.
        repeats: How often a call is made in each round.
        rounds: Number of rounds.
    """

    def mean(call: Callable[[], Any]) -> float:
        jax.block_until_ready(call())
        start = time.perf_counter()
        for _ in range(repeats):
            last = call()
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / repeats

    return _medians_us(calls, rounds, mean)


def _medians_us(
    calls: Sequence[Callable[[], Any]], rounds: int, measured: Callable[[Callable[[], Any]], float]
) -> list[float]:
    """Returns the median over rounds of what is measured of each call, seconds, in microseconds.

    Each round has the calls in a different order.
    """
    found: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(rounds):
        for index in order.sample(range(len(calls)), len(calls)):
            found[index].append(measured(calls[index]))
    return [statistics.median(times) * 1e6 for times in found]


def _once(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def device_name() -> str:
    """Returns a name for file names and tables: 'h200', 'h100' or 'cpu'."""
    if jax.default_backend() != "gpu":
        return "cpu"
    kind = jax.devices()[0].device_kind
    named = re.search(r"\b[A-Z]+\d+\b", kind)  # "NVIDIA H100 80GB HBM3"
    return (named[0] if named else kind.split()[-1]).lower()


def device_words() -> str:
    """Returns the name of the GPU, or of the processor with its number of cores."""
    if jax.default_backend() == "gpu":
        return str(jax.devices()[0].device_kind)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} cores" if names else model
    return model


@functools.cache
def state() -> dict[str, Any]:
    """Returns what a part of a file of results says about this run: device, versions, date, commit and clean tree."""
    # Results that this run has already written do not change the code that is measured.
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    return {
        "device": device_words(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "clean": changes == "",
    }


def _git(*arguments: str) -> str | None:
    """Returns what git prints, None if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def save(benchmark: str, cells: Sequence[dict[str, Any]], path: Path | None = None, **more: Any) -> Path:
    """Adds the cells of this run to the file of a benchmark; returns where that is.

    Args:
        benchmark: Its name, one of `record.KEYS`.
        cells: What was measured.
        path: A file, or the folder that holds it; `benchmarks/results` by default.
        more: Figures of the run as a whole.
    """
    path = path or record.RESULTS
    target = path if path.suffix == ".json" else path / f"{benchmark}_{device_name()}.json"
    old = record.read(target) if target.exists() else None
    head = state()
    if not head["clean"]:
        more = {"rerun": "measured with uncommitted changes", **more}
    record.write(record.merged(benchmark, [record.part(cells, **head, **more)], old), target)
    found = record.summary(cells)
    print(f"{len(cells)} cells" + "".join(f", {name} {value}" for name, value in found.items()) + f": {target}")
    return target


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the argument `--json`."""
    parser.add_argument("--json", type=Path, help="file or folder for the figures (default: benchmarks/results)")


def cell(ours_us: float, xla_us: float, **shape: Any) -> dict[str, Any]:
    """Returns a cell; `ratio` is the other side's time over ours."""
    return {**shape, "ours_us": round(ours_us, 2), "xla_us": round(xla_us, 2), "ratio": round(xla_us / ours_us, 3)}


def show(benchmark: str, cells: Sequence[dict[str, Any]]) -> None:
    """Prints a table."""
    table = Table(title=f"{benchmark} on {device_words()}, jax {jax.__version__}")
    columns = dict.fromkeys(name for row in cells for name in row)
    for name in columns:
        table.add_column(name, justify="right")
    for row in cells:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    Console().print(table)


def run(benchmark: str, cases: Sequence[Any], measure: Callable[[Any], dict[str, Any]]) -> None:
    """Measures all cases with a progress bar, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=f"Benchmark {benchmark}.")
    add_json(parser)
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="only the I-th of N parts of the cases"
    )
    arguments = parser.parse_args()
    index, parts = arguments.part
    chosen = cases[index - 1 :: parts]
    cells = [measure(case) for case in track(chosen, description=benchmark, console=Console(stderr=True))]
    show(benchmark, cells)
    save(benchmark, cells, arguments.json)


def _part(text: str) -> tuple[int, int]:
    """Reads "I/N"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= parts:
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text!r}")
    return index, parts
