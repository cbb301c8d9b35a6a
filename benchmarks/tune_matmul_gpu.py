"""Times the candidate schedules of the Hopper matmul and writes the table of the best ones.

    python -m benchmarks.tune_matmul_gpu --candidates 6

A shape enters `pallas_kernels/matmul/schedule/hopper/matmul.json` where its best candidate is at least 2 % faster
than the one that the rule would choose.
Rows are powers of two; a table entry holds for all rows down to the power below. `runs` says on which GPUs the table
was measured; a run replaces the entries of the shapes and rows that it times.
"""

import argparse
import datetime
import json
import math
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.bench_matmul_gpu import WEIGHTS, activations, integers, pairs, time_us, weights
from benchmarks.workers import Job, Program, Workers
from pallas_kernels.matmul.schedule.hopper import matmul

TABLE = Path(matmul.__file__).with_suffix(".json")
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TRANSPOSED = ((4096, 4096), (14336, 4096), (1536, 576))  # of the gradients of linear layers
DTYPE = "bfloat16"
WORTH = 1.02


class Shape(NamedTuple):
    """Weights (K, N), or stored as (N, K)."""

    k: int
    n: int
    transpose_w: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=6, help="candidates of each shape that are timed")
    parser.add_argument("--rows", type=integers, default=ROWS, help="values of M, separated by commas")
    parser.add_argument("--weights", type=pairs, default=WEIGHTS, help="KxN pairs, separated by commas")
    parser.add_argument("--transposed", type=pairs, default=TRANSPOSED, help="the same for weights stored as (N, K)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no other shape after this time")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit_s
    shapes = [Shape(*pair, False) for pair in arguments.weights] + [Shape(*pair, True) for pair in arguments.transposed]
    stored = json.loads(TABLE.read_text())
    table = {Shape(e["k"], e["n"], e["transpose_w"]): e["rows"] for e in stored["shapes"]}
    with Workers() as workers:
        pending = {
            shape: {m: programs(workers, m, shape, arguments.candidates) for m in arguments.rows} for shape in shapes
        }
        for shape in shapes:
            if time.monotonic() > deadline:
                print(f"The limit of {arguments.limit_s} s is reached before {shape}.")
                break
            entry = table.setdefault(shape, {})
            for m, futures in pending.pop(shape).items():
                entry.pop(str(m), None)
                name = tune(m, shape, futures)
                if name is not None:
                    entry[str(m)] = name
            save(table, stored["runs"])


def programs(workers: Workers, m: int, shape: Shape, count: int) -> dict[str, Future[Program]]:
    """Starts to compile the first candidates of a shape."""
    k, n, transpose_w = shape
    found = matmul.candidates(m, k, n, transpose_w=transpose_w)
    return {
        name: workers.ours(Job(m, k, n, DTYPE, schedule, transpose_w)) for name, schedule in list(found.items())[:count]
    }


def tune(m: int, shape: Shape, futures: dict[str, Future[Program]]) -> str | None:
    """Returns the name of the best candidate, None where the rule's choice is good enough."""
    k, n, transpose_w = shape
    xs, ws = activations(m, k, DTYPE), weights(*((n, k) if transpose_w else (k, n)), DTYPE)
    times: dict[str, float] = {}
    for name, future in futures.items():
        try:
            times[name] = time_us(future.result(), xs, ws)
        except RuntimeError as error:
            print(f"{m} {shape}: {name} left out, {error}")
    if not times:
        return None
    rule, winner = next(iter(futures)), min(times, key=lambda name: times[name])
    best = winner if times[winner] * WORTH < times.get(rule, math.inf) else None
    listed = ", ".join(f"{name} {us:.2f}" for name, us in sorted(times.items(), key=lambda item: item[1]))
    stored = "(N, K)" if transpose_w else "(K, N)"
    print(f"{m:5d} {k:6d} {n:7d} {stored}  {'keep' if best is None else 'TUNE'}  {listed}", flush=True)
    return best


def save(table: dict[Shape, dict[str, str]], runs: list[dict[str, str]]) -> None:
    entries = [
        {**shape._asdict(), "rows": dict(sorted(rows.items(), key=lambda item: int(item[0])))}
        for shape, rows in sorted(table.items())
        if rows
    ]
    now = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }
    runs = [*(run for run in runs if run != now), now]
    TABLE.write_text(json.dumps({"runs": runs, "shapes": entries}, indent=2) + "\n")


if __name__ == "__main__":
    main()
