"""Steps of decoding of a Llama of the 1B shape on a GPU, against the time in which its memory could be read once.

    python -m benchmarks.bench_decode_gpu
    python -m benchmarks.bench_decode_gpu --layers 4 --batches 8 --models own

A step reads every weight and all keys and values of the cache, many times what the L2 cache holds. The limit is the
time which that takes at the speed of a plain copy, measured in the same run. `share` is the limit over the time of a
step where the GPU finds the next one in its queue (`queued_us`). `waited_us` is the time of a step that the host waits
for. Both are wall times. `kernels_us` adds up the times of the kernels of a step, and the other figures say what they
are for.

| model | is |
|---|---|
| own | `flax_layers.Llama` |
| xla, cudnn | the same model with JAX's own operations, and XLA's or cuDNN's attention |
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp

from benchmarks.bench_model_gpu import models
from benchmarks.device_time import copy_bytes_per_us, kernel_table, queued_on_device_us
from benchmarks.harness import add_json, interleaved_us, save, show
from benchmarks.model_steps import Arrays, Cell, arrays, call, plain_loss, step

MODELS: Final = ("own", "xla", "cudnn")
KEYS: Final = 2048
THREADS: Final = 8
ROUNDS: Final = 9
GROUPS: Final = {
    "attention_us": ("attention_decode", "fmha", "flash", "sdpa"),
    "merge_us": ("attention_merge",),
    "products_us": ("matmul", "gemm", "nvjet", "cutlass", "splitk"),
    "norms_us": ("rms_norm",),
    "rotation_us": ("rotate_and_store",),
}
"""What kernels are for, by parts of their names in lower case; the first that fits."""


def measure(cell: Cell, held: Arrays, programs: dict[str, Any], bytes_per_us: float) -> Iterator[dict[str, Any]]:
    """Yields the figures of all programs of a cell, which share their arrays."""
    calls = [lambda program=program: call(program, held) for program in programs.values()]
    waited = interleaved_us(calls, seconds=2, rounds=ROUNDS)
    queued = [queued_on_device_us(run) for run in calls]
    size = bytes_once(held)
    for name, run, one, many in zip(programs, calls, waited, queued, strict=True):
        table = kernel_table(run)
        limit = size / bytes_per_us
        yield {
            **{"model": name, "batch": cell.batch, "keys": cell.keys},
            **{"queued_us": round(many, 1), "waited_us": round(one, 1), "limit_us": round(limit, 1)},
            **{"share": round(limit / many, 3), "mib": round(size / 2**20), "copy_gb_s": round(bytes_per_us / 1e3)},
            **{"kernels": round(sum(count for _, count, _ in table)), **groups(table)},
        }


def bytes_once(held: Arrays) -> int:
    """Returns the bytes of the weights and of a full cache."""
    cache, params = held.changed[0], held.kept[0]
    return sum(x.nbytes for x in jax.tree.leaves((cache, params)) if jnp.issubdtype(x.dtype, jnp.floating))


def groups(table: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Returns the time of all kernels, and of each group."""
    found: dict[str, float] = defaultdict(float)
    for name, _, us in table:
        fitting = (group for group, words in GROUPS.items() if any(word in name.lower() for word in words))
        found[next(fitting, "others_us")] += us
    times = {group: round(found[group], 1) for group in (*GROUPS, "others_us")}
    return {"kernels_us": round(sum(found.values()), 1), **times}


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of decoding on a GPU, against the speed of its memory.")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--models", default=",".join(MODELS))
    add_json(parser)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"expected models among {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    found = models(["own"], arguments.layers, KEYS, "bfloat16", remat=False)
    copies, rows = [copy_bytes_per_us()], []
    for batch in map(int, arguments.batches.split(",")):
        cell = Cell("decode", batch, KEYS)
        held = arrays(found["own"], cell)
        ready = {}
        with ThreadPoolExecutor(THREADS) as pool:  # XLA tunes on the GPU while it compiles: before anything is timed
            for name in names:
                made = jax.jit(step(found[name], cell, plain_loss), donate_argnums=0)
                ready[name] = pool.submit(made.lower(*held.changed, *held.kept).compile)
        programs = {name: future.result() for name, future in ready.items()}
        copies.append(copy_bytes_per_us())
        for row in measure(cell, held, programs, statistics.median(copies)):
            print(row, flush=True)
            rows.append({"layers": arguments.layers} | row)
    show("decode_bf16", rows)
    save("decode_bf16", rows, arguments.json)


if __name__ == "__main__":
    main()
