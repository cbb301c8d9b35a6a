"""Matmul on a Hopper GPU: XLA's default dot and ours in the same run.

    PYTHONPATH=. python benchmarks/bench_matmul_gpu.py --dtype bfloat16

Times are device times of all kernels of a call (CUPTI), medians over calls that walk through copies of the weights, so
that nothing stays in the L2 cache. Both sides see the same arrays. The file is written after every (K, N).
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import RESULTS, cell, device_name, record, write
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.contract import WgmmaContract
from pallas_kernels.matmul.mosaic_gpu import matmul

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
THREADS = 8

Program = Callable[[jax.Array, jax.Array], jax.Array]


def main() -> None:
    arguments = parse()
    if jax.default_backend() != "gpu":
        print(f"bench_matmul_gpu needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    short = {"bfloat16": "bf16", "float16": "f16"}[arguments.dtype]
    path = arguments.json or RESULTS / f"matmul_{short}_{device_name()}.json"
    ours = functools.partial(matmul, contract=WgmmaContract())
    deadline = time.monotonic() + arguments.limit_s
    cells: list[dict[str, Any]] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for k, n in arguments.weights:
            if time.monotonic() > deadline:
                print(f"The limit of {arguments.limit_s} s is reached before K={k}, N={n}.")
                break
            shapes = [(m, k, n) for m in arguments.rows]
            programs = compile_all(pool, [jnp.dot, ours], shapes, arguments.dtype)
            ws = weights(k, n, arguments.dtype)
            for (m, _, _), (theirs, mine) in zip(shapes, programs, strict=True):
                xs = activations(m, k, arguments.dtype)
                xla_us, ours_us = device_time_us(theirs, xs, ws), device_time_us(mine, xs, ws)
                cells.append(cell(ours_us, xla_us, m=m, k=k, n=n, dtype=arguments.dtype))
                gigabytes = (m * k + k * n + m * n) * 2 / ours_us / 1e3
                print(
                    f"{m:5d} {k:6d} {n:7d}  xla {xla_us:9.2f} us  ours {ours_us:9.2f} us  ratio {xla_us / ours_us:.3f}"
                    f"  {gigabytes:5.0f} GB/s  {2e-6 * m * k * n / ours_us:4.0f} TFLOP/s",
                    flush=True,
                )
            result = record(f"matmul_{short}", cells)
            write(result, path)
            print(
                f"{len(cells)} cells, geometric mean {result['geomean']}, worst {result['worst']}: {path}", flush=True
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rows", type=integers, default=ROWS, help="values of M, separated by commas")
    parser.add_argument("--weights", type=pairs, default=WEIGHTS, help="KxN pairs, separated by commas")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no further (K, N) after this time")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: benchmarks/results)")
    return parser.parse_args()


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def pairs(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(k), int(n)) for k, n in (pair.split("x") for pair in text.split(",")))


def compile_all(
    pool: ThreadPoolExecutor, functions: list[Program], shapes: list[tuple[int, int, int]], dtype: str
) -> list[list[Program]]:
    """Compiles every function for every shape (M, K, N) side by side, before anything is timed."""

    def compiled(function: Program, m: int, k: int, n: int) -> Program:
        x, w = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
        return jax.jit(lambda x, w: function(x, w)).lower(x, w).compile()

    pending = [[pool.submit(compiled, function, *shape) for function in functions] for shape in shapes]
    return [[program.result() for program in row] for row in pending]


def device_time_us(program: Program, xs: list[jax.Array], ws: list[jax.Array]) -> float:
    """Returns the median device time of a call, in µs; calls walk through the arrays."""
    (m, k), n = xs[0].shape, ws[0].shape[1]
    expected_us = max(2e-9 * m * k * n / 0.7, k * n * 2 / 4e6)
    calls = int(min(max(2 * len(ws), 8), max(8, 20_000 / expected_us)))
    jax.block_until_ready(program(xs[0], ws[0]))
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # `profiler.measure` repeats a call on the same arrays only
    cupti._cupti_init()
    try:
        for i in range(calls):
            out = program(xs[i % len(xs)], ws[i % len(ws)])
        out.block_until_ready()
    finally:
        kernels = cupti._cupti_get_timings(False)
    if not kernels or len(kernels) % calls:
        raise RuntimeError(f"expected the same number of kernels in each of {calls} calls, got {len(kernels)} kernels.")
    each = len(kernels) // calls
    return statistics.median(sum(ms for _, ms in kernels[i * each : (i + 1) * each]) for i in range(calls)) * 1e3


def weights(k: int, n: int, dtype: str) -> list[jax.Array]:
    """Returns copies of (K, N) weights that together do not fit into the L2 cache."""
    copies = max(2, min(64, math.ceil(ROTATED_BYTES / (k * n * 2))))
    make = jax.jit(lambda key: jax.random.normal(key, (k, n), dtype))
    return [make(jax.random.key(i)) for i in range(copies)]


def activations(m: int, k: int, dtype: str) -> list[jax.Array]:
    """Returns two arrays (M, K), made without compiling a program for each shape."""
    return [jnp.asarray(np.resize(np.roll(pattern(dtype), shift), (m, k))) for shift in (0, 7919)]


@functools.cache
def pattern(dtype: str) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(4_000_037).astype(jnp.dtype(dtype))


if __name__ == "__main__":
    main()
