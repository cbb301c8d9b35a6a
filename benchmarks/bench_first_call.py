"""How long the first call of a program takes on a CPU, in a new process: a model of two layers of SmolLM2-135M's shape.

    python -m benchmarks.bench_first_call [--json FILE]

A call is traced, lowered, compiled and run once, with random weights that are already there. Python's modules are
compiled to bytecode before, as pip does when it installs them. Wall time is what a user
waits for; processor time, which is that of all threads, changes less with other work on the machine. "none" is without
a compilation cache, "filled" with the folder of JAX's compilation cache that an earlier process has filled. Both are
the least of some processes, which alternate. `ratio` is plain JAX's wall time over ours, `processor_ratio` the same of
the processor time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track

import bijax
from benchmarks import model_steps
from benchmarks.harness import add_json, save, show
from benchmarks.model_steps import Cell
from flax_layers import INVARIANT, PLAIN, Llama
from flax_layers.checkpoint import LlamaConfig

MODELS: Final = ("plain", "transformed", "own")
CELLS: Final = {"prefill": Cell("prefill", 1, 64), "decode": Cell("decode", 8, 64), "train": Cell("train", 2, 64)}
CACHES: Final = ("none", "filled")
PROCESSES: Final = 3
CONFIG: Final = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    bos_token_id=None,
    eos_token_ids=(),
)


def once(name: str, case: str) -> dict[str, float]:
    """Returns the seconds that the first call takes in this process."""
    model = Llama(CONFIG, ops=INVARIANT if name == "own" else PLAIN, rngs=nnx.Rngs(0))
    loss = model_steps.own_loss if name == "own" else model_steps.plain_loss
    step = model_steps.step(model, CELLS[case], loss, plain=name != "own")
    arrays = model_steps.arrays(model, CELLS[case])
    jax.block_until_ready((arrays, jax.jit(jnp.sin)(np.float32(1))))  # what JAX itself does once in a process
    used, start = time.process_time(), time.perf_counter()
    program = jax.jit(bijax.invariant(step) if name == "transformed" else step)
    jax.block_until_ready(program(*arrays.changed, *arrays.kept))
    taken = {"processor_s": time.process_time() - used, "wall_s": time.perf_counter() - start}
    return {key: round(value, 3) for key, value in taken.items()}


def in_process(name: str, case: str, folder: str, cache: str) -> dict[str, float]:
    """Returns the seconds of the first call in a new process.

    Args:
        name: The model.
        case: The program.
        folder: Where processes leave bytecode and, if `cache` is "filled", compiled programs for later ones.
        cache: One of `CACHES`.
    """
    unset = ("JAX_COMPILATION", "JAX_PERSISTENT", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
    environment["PYTHONPYCACHEPREFIX"] = os.path.join(folder, "bytecode")
    if cache == "filled":
        environment["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "programs")
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, "-m", "benchmarks.bench_first_call", "--once", name, case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(cases: list[str], processes: int) -> list[dict[str, Any]]:
    """Returns a row for each model but the plain one, program and cache."""
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    runs = [(case, cache, turn) for case in cases for cache in CACHES for turn in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            for name in MODELS:
                in_process(name, case, folder, "filled")
        for case, cache, _ in track(runs, description="processes", console=Console(stderr=True)):
            for name in MODELS:
                seconds = in_process(name, case, folder, cache)
                found.setdefault((case, cache, name), []).append(seconds)
    rows = []
    for (case, cache, name), times in found.items():
        if name == "plain":
            continue
        ours, plain = (
            {key: min(t[key] for t in some) for key in some[0]} for some in (times, found[case, cache, "plain"])
        )
        row = {"model": name, "case": case, "cache": cache, **ours}
        row |= {f"plain_{key}": value for key, value in plain.items()}
        row["ratio"] = round(plain["wall_s"] / ours["wall_s"], 3)
        row["processor_ratio"] = round(plain["processor_s"] / ours["processor_s"], 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--cases", nargs="*", choices=CELLS, default=list(CELLS), help="some of the programs")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="new processes of each kind")
    parser.add_argument("--once", nargs=2, metavar=("MODEL", "PROGRAM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(once(*arguments.once)))
        return
    rows = measured(arguments.cases, arguments.processes)
    show("first_call", rows)
    save("first_call", rows, arguments.json)


if __name__ == "__main__":
    main()
