"""Chains of element-wise operations on a GPU: `bijax.invariant`, whose fences they pass, against plain XLA.

python -m benchmarks.bench_elementwise_gpu
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from benchmarks.harness import add_json, cell, save

KINDS: dict[str, list[Callable[[jax.Array, jax.Array], jax.Array]]] = {
    "arithmetic": [
        lambda a, x: a * x,
        lambda a, x: a + x,
        lambda a, x: a * 0.5 - x,
        lambda a, x: jnp.maximum(a, x * 0.25),
    ],
    "functions": [
        lambda a, x: jnp.tanh(a),
        lambda a, x: jnp.exp(-jnp.abs(a)) + x,
        lambda a, x: jax.nn.sigmoid(a) * x,
        lambda a, x: jax.nn.gelu(a),
    ],
    "divisions": [lambda a, x: a / (jnp.abs(x) + 1), lambda a, x: a + x],
}
LENGTHS = (1, 2, 5, 10, 20)
MEBIBYTES = (1, 16, 256)
DTYPES = ("float32", "bfloat16")
ROTATED_BYTES = 3e8


def chain(kind: str, length: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a program of `length` operations."""

    def run(a: jax.Array, x: jax.Array) -> jax.Array:
        for i in range(length):
            a = KINDS[kind][i % len(KINDS[kind])](a, x)
        return a

    return run


def measure(kind: str, length: int, mebibytes: int, dtype: str) -> dict[str, Any]:
    """Returns device times and their ratio."""
    from benchmarks.device_time import device_time_us  # needs the CUDA build of jax

    columns = 4096
    rows = mebibytes * 2**20 // columns // jnp.dtype(dtype).itemsize
    sets = max(2, min(8, math.ceil(ROTATED_BYTES / (2 * mebibytes * 2**20))))
    draw = np.random.default_rng(0)
    pattern = draw.standard_normal(1_000_003).astype(np.float32)
    data = [
        tuple(jnp.asarray(np.resize(np.roll(pattern, 977 * (2 * i + j)), (rows, columns)), dtype) for j in range(2))
        for i in range(sets)
    ]
    run = chain(kind, length)
    programs = [jax.jit(f).lower(*data[0]).compile() for f in (bijax.invariant(run), run)]
    ours_us, xla_us = (device_time_us(program, data, 16) for program in programs)
    return cell(ours_us, xla_us, operations=length, op=kind, dtype=dtype, mebibytes=mebibytes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Element-wise chains on a GPU.")
    add_json(parser)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_elementwise_gpu needs a GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    cells = []
    for kind in KINDS:
        for dtype in DTYPES:
            for mebibytes in MEBIBYTES:
                cells += [measure(kind, length, mebibytes, dtype) for length in LENGTHS]
                ratios = [c["ratio"] for c in cells[-len(LENGTHS) :]]
                print(f"{kind:10s} {dtype:8s} {mebibytes:4d} MiB {ratios}", flush=True)
    save("elementwise", cells, arguments.json)


if __name__ == "__main__":
    main()
