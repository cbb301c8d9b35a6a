"""Row operators of an inference engine on a Hopper GPU, against the same steps in plain JAX and the memory floor.

    python -m benchmarks.bench_engine_rows_gpu --limit-s 200

Times are device times of all kernels of a call, medians; `kernels` is how many of them a call runs. The floor is the
time of the bytes that have to be read and written, at the speed of a copy in the same run.
"""

import argparse
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax

from benchmarks.device_time import copy_bytes_per_us, device_time_us
from benchmarks.engine_cases import Case, cases
from benchmarks.harness import add_json, cell, save

TOKENS: Final = (8, 64, 2048, 8192)
COLUMNS: Final = 7168
ROTATED_BYTES: Final = 250_000_000  # several times the L2 cache
CALLS: Final = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=TOKENS)
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--only", default="", help="a part of the operators' names")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no other operator after this time")
    add_json(parser)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_engine_rows_gpu needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing done")
        return
    deadline = time.monotonic() + arguments.limit_s
    wanted = [c for t in arguments.tokens for c in cases(t, arguments.columns) if arguments.only in c.name]
    with ThreadPoolExecutor(8) as threads:  # XLA tunes on the GPU while it compiles: before anything is timed
        programs = list(threads.map(lambda c: (_compiled(c, c.ours), _compiled(c, c.plain)), wanted))
    speed = copy_bytes_per_us()
    print(f"copies {speed * 1e-6:.2f} TB/s", flush=True)
    cells: list[dict[str, Any]] = []
    for case, (ours, plain) in zip(wanted, programs, strict=True):
        if time.monotonic() > deadline:
            break
        times = [_time_us(case, program) for program in (ours, plain)]
        floor = case.moved / speed
        shape = {"operator": case.name, "tokens": case.tokens, "columns": case.columns, "floor_us": round(floor, 2)}
        cells.append(cell(*times, **shape, of_floor=round(times[0] / floor, 2)))
        print(cells[-1], flush=True)
    save("engine_rows", cells, arguments.json)


def _compiled(case: Case, function: Any) -> Any:
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    return jax.jit(function, donate_argnums=case.donated).lower(*shapes).compile()


def _time_us(case: Case, program: Any) -> float:
    copies = max(2, min(32, math.ceil(ROTATED_BYTES / case.moved)))
    make = jax.jit(case.make)
    sets = [make(jax.random.key(i)) for i in range(copies)]
    if not case.donated:
        return device_time_us(program, sets, max(CALLS, copies))
    state = {i: list(one[: len(case.donated)]) for i, one in enumerate(sets)}
    rest = [(i, *one[len(case.donated) :]) for i, one in enumerate(sets)]

    def call(i: int, *others: Any) -> Any:
        out = program(*state[i], *others)
        state[i] = list(out[: len(case.donated)])
        return out

    return device_time_us(call, rest, max(CALLS, copies))


if __name__ == "__main__":
    main()
