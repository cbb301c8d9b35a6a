"""Times the candidate schedules of the Hopper matmul and writes the table of the best ones.

    PYTHONPATH=. python benchmarks/tune_matmul_gpu.py --candidates 6

A shape enters `pallas_kernels/schedule/hopper_matmul.json` where its best candidate is at least 2 % faster than the one
that the rule would choose. Rows are powers of two; a table entry holds for all rows down to the power below.
"""

import argparse
import datetime
import functools
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from bench_matmul_gpu import THREADS, WEIGHTS, activations, compile_all, device_time_us, integers, pairs, weights

from pallas_kernels.contract import WgmmaContract
from pallas_kernels.matmul.mosaic_gpu import matmul
from pallas_kernels.schedule import hopper

TABLE = Path(hopper.__file__).with_name("hopper_matmul.json")
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WORTH = 1.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=6, help="candidates of each shape that are timed")
    parser.add_argument("--rows", type=integers, default=ROWS, help="values of M, separated by commas")
    parser.add_argument("--weights", type=pairs, default=WEIGHTS, help="KxN pairs, separated by commas")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no further (K, N) after this time")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit_s
    table = json.loads(TABLE.read_text())
    shapes = {(e["k"], e["n"], e["transpose_w"]): e["rows"] for e in table["shapes"]}
    with ThreadPoolExecutor(THREADS) as pool:
        for k, n in arguments.weights:
            if time.monotonic() > deadline:
                print(f"The limit of {arguments.limit_s} s is reached before K={k}, N={n}.")
                break
            for m, name in tune(pool, arguments.rows, k, n, arguments.candidates).items():
                entry = shapes.setdefault((k, n, False), {})
                entry.pop(str(m), None)
                if name is not None:
                    entry[str(m)] = name
            table = {
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "date": datetime.date.today().isoformat(),
                "shapes": [
                    {
                        "k": k,
                        "n": n,
                        "transpose_w": t,
                        "rows": dict(sorted(rows.items(), key=lambda item: int(item[0]))),
                    }
                    for (k, n, t), rows in sorted(shapes.items())
                    if rows
                ],
            }
            TABLE.write_text(json.dumps(table, indent=2) + "\n")


def tune(pool: ThreadPoolExecutor, rows: tuple[int, ...], k: int, n: int, count: int) -> dict[int, str | None]:
    """Returns the name of the best candidate for each number of rows, None where the rule's choice will do."""
    best: dict[int, str | None] = {}
    found = {m: dict(list(hopper.candidates(m, k, n).items())[:count]) for m in rows}
    programs = {
        m: [functools.partial(matmul, contract=WgmmaContract(), schedule=s) for s in found[m].values()] for m in rows
    }
    ws = weights(k, n, "bfloat16")
    for m in rows:
        (compiled,) = compile_all(pool, programs[m], [(m, k, n)], "bfloat16")
        xs = activations(m, k, "bfloat16")
        times = {name: device_time_us(p, xs, ws) for name, p in zip(found[m], compiled, strict=True)}
        rule, winner = next(iter(times)), min(times, key=lambda name: times[name])
        best[m] = winner if times[winner] * WORTH < times[rule] else None
        listed = ", ".join(f"{name} {us:.2f}" for name, us in sorted(times.items(), key=lambda item: item[1]))
        print(f"{m:5d} {k:6d} {n:7d}  {'keep' if best[m] is None else 'TUNE'}  {listed}", flush=True)
    return best


if __name__ == "__main__":
    main()
