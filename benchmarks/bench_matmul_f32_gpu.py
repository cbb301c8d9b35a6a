"""Float32 matmul on a Hopper GPU: XLA's dot and ours in the same run, at both precisions, for both storages.

    python -m benchmarks.bench_matmul_f32_gpu

Times are device times of all kernels of a call (CUPTI), medians over calls that cycle through copies of the weights, so
that nothing stays in the L2 cache. All programs are compiled before anything is timed, because XLA tries its kernels on
the device while it compiles. The file is written after every (K, N).
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.device_time import device_time_us
from benchmarks.harness import add_json, cell, save
from benchmarks.record import summary
from pallas_kernels.contract import Tf32Contract, split_contract
from pallas_kernels.matmul.hopper import bf16x6, tf32

ROWS = (1, 8, 64, 512, 4096)
WEIGHTS = ((4096, 4096), (4096, 1024), (4096, 14336), (2048, 2048), (576, 1536))
PRECISIONS = ("default", "highest")
ROTATED_BYTES = 250_000_000  # several times the L2 cache
THREADS = 16

Program = Callable[[jax.Array, jax.Array], jax.Array]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=pairs, default=WEIGHTS, help="KxN pairs, separated by commas")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no other (K, N) after this time")
    add_json(parser)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(
            f"bench_matmul_f32_gpu needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing measured"
        )
        return
    deadline = time.monotonic() + arguments.limit_s
    with ThreadPoolExecutor(THREADS) as pool:
        pending = {case: pool.submit(compiled, *case) for case in cases(arguments.weights)}
        programs = {case: program.result() for case, program in pending.items()}
    print(f"{len(programs)} programs compiled", flush=True)
    cells: list[dict[str, Any]] = []
    for k, n in arguments.weights:
        for transpose_w in (False, True):
            if time.monotonic() > deadline:
                print(f"The limit of {arguments.limit_s} s is reached before K={k}, N={n}, {transpose_w=}.")
                continue
            ws = weights(k, n, transpose_w)
            for m in ROWS:
                xs = activations(m, k)
                for precision in PRECISIONS:
                    times = [
                        time_us(programs[precision, transpose_w, m, k, n, ours], xs, ws, m, k, n)
                        for ours in (False, True)
                    ]
                    shape = {"m": m, "k": k, "n": n, "transpose_w": transpose_w, "precision": precision}
                    cells.append(cell(times[1], times[0], **shape))
                line = "  |  ".join(
                    f"{c['precision']} xla {c['xla_us']:8.2f} ours {c['ours_us']:8.2f} us {c['ratio']:.3f}"
                    for c in cells[-len(PRECISIONS) :]
                )
                print(f"{'NK' if transpose_w else 'KN'} {m:5d} {k:6d} {n:6d}  {line}", flush=True)
            save("matmul_f32", cells, arguments.json)
    for precision in PRECISIONS:
        for transpose_w in (False, True):
            part = [c for c in cells if (c["precision"], c["transpose_w"]) == (precision, transpose_w)]
            if part:
                print(f"{precision} {'NK' if transpose_w else 'KN'}: {len(part)} cells, {summary(part)}")


def pairs(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(k), int(n)) for k, n in (pair.split("x") for pair in text.split(",")))


def cases(shapes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, bool, int, int, int, bool]]:
    """Yields (precision, whether weights are stored as (N, K), M, K, N, whether the program is ours)."""
    for k, n in shapes:
        for transpose_w in (False, True):
            for m in ROWS:
                for precision in PRECISIONS:
                    for ours in (False, True):
                        yield precision, transpose_w, m, k, n, ours


def compiled(precision: str, transpose_w: bool, m: int, k: int, n: int, ours: bool) -> Program:
    x = jax.ShapeDtypeStruct((m, k), jnp.float32)
    w = jax.ShapeDtypeStruct((n, k) if transpose_w else (k, n), jnp.float32)

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        if not ours:
            dimensions = (((1,), (1 if transpose_w else 0,)), ((), ()))
            return lax.dot_general(x, w, dimensions, precision="highest" if precision == "highest" else None)
        if precision == "highest":
            return bf16x6.matmul(x, w, contract=split_contract(k), transpose_w=transpose_w)
        return tf32.matmul(x, w, contract=Tf32Contract(), transpose_w=transpose_w)

    return jax.jit(function).lower(x, w).compile()


def time_us(program: Program, xs: list[jax.Array], ws: list[jax.Array], m: int, k: int, n: int) -> float:
    expected_us = max(2e-6 * m * k * n / 60, k * n * 4 / 4e6)
    calls = int(min(max(2 * len(ws), 8), max(5, 10_000 / expected_us)))
    pairs = [(xs[i % len(xs)], ws[i % len(ws)]) for i in range(math.lcm(len(xs), len(ws)))]
    return device_time_us(program, pairs, calls)


def weights(k: int, n: int, transpose_w: bool) -> list[jax.Array]:
    """Returns copies of the weights that together do not fit into the L2 cache."""
    copies = max(2, min(24, math.ceil(ROTATED_BYTES / (k * n * 4))))
    make = jax.jit(lambda key: jax.random.normal(key, (n, k) if transpose_w else (k, n)))
    return [make(jax.random.key(i)) for i in range(copies)]


def activations(m: int, k: int) -> list[jax.Array]:
    pattern = np.random.default_rng(0).standard_normal(4_000_037).astype(np.float32)
    return [jnp.asarray(np.resize(np.roll(pattern, shift), (m, k))) for shift in (0, 7919)]


if __name__ == "__main__":
    main()
