"""Matmul on a Hopper GPU: XLA's default dot and ours in the same run.

    python -m benchmarks.bench_matmul_gpu --dtype bfloat16
    python -m benchmarks.bench_matmul_gpu --dtype bfloat16 --backend jax_triton

Times are device times of all kernels of a call (CUPTI), medians over calls that cycle through copies of the weights, so
that nothing stays in the L2 cache. Both sides see the same arrays. The file is written after every (K, N).
"""

import argparse
import functools
import math
import time
from typing import Any

import jax

from benchmarks.device_time import device_time_us
from benchmarks.harness import add_json, cell, save
from benchmarks.workers import Job, Program, Workers

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WEIGHTS = (
    (4096, 4096),
    (4096, 1024),
    (4096, 6144),
    (4096, 14336),
    (14336, 4096),
    (8192, 8192),
    (8192, 1280),
    (8192, 7168),
    (1024, 8192),
    (3584, 8192),
    (2048, 2048),
    (2048, 6144),
    (576, 1536),
    (576, 49152),
    (4096, 128256),
)

ROTATED_BYTES = 250_000_000  # several times the L2 cache


def main() -> None:
    arguments = parse()
    if jax.default_backend() != "gpu":
        print(f"bench_matmul_gpu needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    short = {"bfloat16": "bf16", "float16": "f16"}[arguments.dtype]
    deadline = time.monotonic() + arguments.limit_s
    cells: list[dict[str, Any]] = []
    dtype, backend = arguments.dtype, arguments.backend
    jobs = {(k, n): [Job(m, k, n, dtype, backend=backend) for m in arguments.rows] for k, n in arguments.weights}
    with Workers() as workers:
        pending = {shape: [workers.ours(job) for job in found] for shape, found in jobs.items()}
        ours = {shape: [program.result() for program in found] for shape, found in pending.items()}
        for (k, n), found in jobs.items():
            if time.monotonic() > deadline:
                print(f"The limit of {arguments.limit_s} s is reached before K={k}, N={n}.")
                break
            # XLA tunes on the GPU while it compiles: it has to be done before anything is timed.
            theirs = [program.result() for program in [workers.xla(job) for job in found]]
            ws = weights(k, n, arguments.dtype)
            for job, xla, mine in zip(found, theirs, ours[k, n], strict=True):
                xs = activations(job.m, k, arguments.dtype)
                try:
                    xla_us, ours_us = time_us(xla, xs, ws), time_us(mine, xs, ws)
                except RuntimeError as error:
                    print(f"{job.m:5d} {k:6d} {n:7d}  skipped: {error}", flush=True)
                    continue
                cells.append(cell(ours_us, xla_us, m=job.m, k=k, n=n, dtype=arguments.dtype))
                gigabytes = (job.m * k + k * n + job.m * n) * 2 / ours_us / 1e3
                teraflops = 2e-6 * job.m * k * n / ours_us
                print(
                    f"{job.m:5d} {k:6d} {n:7d}  xla {xla_us:9.2f} us  ours {ours_us:9.2f} us "
                    f" ratio {xla_us / ours_us:.3f}  {gigabytes:5.0f} GB/s  {teraflops:4.0f} TFLOP/s",
                    flush=True,
                )
            save(f"matmul_{short}" + ("" if backend == "hopper" else f"_{backend}"), cells, arguments.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--backend", choices=("hopper", "jax_triton"), default="hopper", help="whose kernels are ours")
    parser.add_argument("--rows", type=integers, default=ROWS, help="values of M, separated by commas")
    parser.add_argument("--weights", type=pairs, default=WEIGHTS, help="KxN pairs, separated by commas")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no other (K, N) after this time")
    add_json(parser)
    return parser.parse_args()


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def pairs(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(k), int(n)) for k, n in (pair.split("x") for pair in text.split(",")))


def time_us(program: Program, xs: list[jax.Array], ws: list[jax.Array]) -> float:
    """Returns the median device time of a call, in µs; calls cycle through the arrays."""
    m = xs[0].shape[0]
    expected_us = max(2e-6 * m * ws[0].size / 700, ws[0].size * 2 / 4e6)
    calls = int(min(max(2 * len(ws), 8), max(8, 20_000 / expected_us)))
    sets = [(xs[i % len(xs)], ws[i % len(ws)]) for i in range(max(len(xs), len(ws)))]
    return device_time_us(program, sets, calls)


@functools.lru_cache(maxsize=2)
def weights(k: int, n: int, dtype: str) -> list[jax.Array]:
    """Returns copies of (K, N) weights that together do not fit into the L2 cache."""
    copies = max(2, min(64, math.ceil(ROTATED_BYTES / (k * n * 2))))
    make = jax.jit(lambda key: jax.random.normal(key, (k, n), dtype))
    return [make(jax.random.key(i)) for i in range(copies)]


def activations(m: int, k: int, dtype: str) -> list[jax.Array]:
    """Returns two arrays (M, K)."""
    return [x[:m] for x in most_activations(k, dtype)]


@functools.lru_cache(maxsize=2)
def most_activations(k: int, dtype: str) -> list[jax.Array]:
    make = jax.jit(lambda key: jax.random.normal(key, (max(ROWS), k), dtype))
    return [make(jax.random.key(i)) for i in range(2)]


if __name__ == "__main__":
    main()
