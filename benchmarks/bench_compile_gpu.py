"""How long a step of a whole model is lowered and compiled in a new process, alone, on a GPU.

    python -m benchmarks.bench_compile_gpu [--cells prefill:1x2048 gradient:2x512] [--models own xla] [--json FILE]

Each figure is a process of its own. No model is allocated; the caches of JAX and of bijax are empty ("cold"), filled
by the same program ("again"), or by a model of another number of layers ("other layers"). `ratio` is the plain model's
seconds of lowering and compiling, with XLA's attention and the same state of the caches, over ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

import bijax
from benchmarks.bench_model_gpu import AGAINST, TRANSFORMED, config
from benchmarks.cudnn_ops import CudnnOps
from benchmarks.harness import add_json, save
from benchmarks.model_steps import Cell, arrays, own_loss, plain_loss, step
from flax_layers import INVARIANT, PLAIN, Llama

CELLS: Final = ("prefill:1x2048", "gradient:2x512", "decode:8x2048")
MODELS: Final = ("own", "transformed")
PLAIN_MODEL: Final = "xla"
LAYERS: Final = 4
CACHES: Final = {"cold": LAYERS, "again": LAYERS, "other layers": LAYERS + 2}
"""Layers of the model by what the cache holds; the order in which they are run."""


def once(cell: Cell, name: str, layers: int) -> dict[str, float]:
    """Returns the seconds of this process."""
    ops = {"own": INVARIANT, "cudnn": CudnnOps(), "transformed_cudnn": CudnnOps()}.get(name, PLAIN)
    dtypes: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = nnx.eval_shape(lambda: Llama(config(layers, cell.keys), ops=ops, rngs=nnx.Rngs(0), **dtypes))
    made = step(model, cell, own_loss if name == "own" else plain_loss, plain=name not in AGAINST)
    held = jax.eval_shape(lambda: arrays(model, cell))
    program = bijax.invariant(made) if name in TRANSFORMED else made
    jax.jit(lambda x: x + 1)(jnp.zeros(1)).block_until_ready()  # the GPU itself starts
    start = time.perf_counter()
    lowered = jax.jit(program, donate_argnums=tuple(range(len(held.changed)))).lower(*held.changed, *held.kept)
    middle = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    return {"lower_s": round(middle - start, 2), "compile_s": round(end - middle, 2)}


def in_processes(cell: str, name: str, caches: list[str]) -> dict[str, dict[str, float]]:
    """Returns the seconds of a step by what the caches hold, from a process for each."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in (c for c in CACHES if c in caches):
            call = [sys.executable, "-m", "benchmarks.bench_compile_gpu"]
            call += ["--once", cell, name, str(CACHES[cache]), folder]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{cell}, {name}, {cache}: {done.stderr[-2000:]}")
            found[cache] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(cells: list[str], names: list[str], caches: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the lines of the table."""
    for cell in cells:
        plain = in_processes(cell, PLAIN_MODEL, caches)
        for name in names:
            for cache, seconds in in_processes(cell, name, caches).items():
                other = plain[cache]
                ratio = sum(other.values()) / sum(seconds.values())
                row = {"model": name, "case": cell, "cache": cache, **seconds}
                yield row | {f"plain_{key}": value for key, value in other.items()} | {"ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=list(CACHES))
    add_json(parser)
    parser.add_argument("--once", nargs=4, metavar=("CELL", "MODEL", "LAYERS", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        cell, name, layers, folder = arguments.once
        jax.config.update("jax_compilation_cache_dir", folder)
        print(json.dumps(once(Cell.parse(cell), name, int(layers))))
        return
    rows = []
    for row in measured(arguments.cells, arguments.models, arguments.caches):
        rows.append(row)
        print(json.dumps(row), flush=True)
        save("compile", rows, arguments.json, cores=os.cpu_count())


if __name__ == "__main__":
    main()
