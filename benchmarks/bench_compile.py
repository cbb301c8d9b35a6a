"""How long SmolLM2-135M is lowered and compiled on a CPU: the whole model as one program, in a new process.

    python -m benchmarks.bench_compile [--json FILE]

`ratio` is plain JAX's wall time over ours, `processor_ratio` the same of the processor time, which other work on the
machine changes less. "again" is the same program a second time in the process, after `jax.clear_caches()`: then
products are not compared with their reference again.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from rich.progress import track

import bijax
from benchmarks.harness import add_json, save, show
from flax_layers import INVARIANT, PLAIN, Llama
from flax_layers.checkpoint import load_checkpoint, smollm2_path

MODELS: Final = ("plain", "transformed", "own")
CELLS: Final = ("forward", "gradient")
TOKENS: Final = (2, 64)
PROCESSES: Final = 2


def program(model: Llama, cell: str) -> tuple[Callable[..., Any], Any]:
    """Returns what is compiled, and the weights that it takes."""
    structure, weights = nnx.split(model)

    def forward(weights: Any, tokens: jax.Array) -> jax.Array:
        logits: jax.Array = nnx.merge(structure, weights)(tokens)
        return logits

    def loss(weights: Any, tokens: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(forward(weights, tokens))[:, :-1, 0].mean()

    return (forward if cell == "forward" else jax.value_and_grad(loss)), weights


def once(name: str, cell: str) -> dict[str, dict[str, float]]:
    """Returns the seconds that this process takes, the first time and again."""
    checkpoint = load_checkpoint(smollm2_path())
    made, weights = program(Llama.from_checkpoint(checkpoint, ops=INVARIANT if name == "own" else PLAIN), cell)
    tokens = jnp.ones(TOKENS, jnp.int32)
    result = {}
    for cache in ("cold", "again"):
        jax.clear_caches()
        traced = jax.jit(bijax.invariant(made) if name == "transformed" else made).trace(weights, tokens)
        used, start = time.process_time(), time.perf_counter()
        traced.lower().compile()
        taken = {"processor_s": time.process_time() - used, "wall_s": time.perf_counter() - start}
        result[cache] = {key: round(value, 2) for key, value in taken.items()}
    return result


def measured() -> list[dict[str, Any]]:
    """Returns a row for each model but the plain one, program and cache: the least of alternating processes."""
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    runs = [(cell, name) for _ in range(PROCESSES) for cell in CELLS for name in MODELS]
    for cell, name in track(runs, description="processes"):
        call = [sys.executable, "-m", "benchmarks.bench_compile", "--once", name, cell]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        for cache, seconds in json.loads(done.stdout.splitlines()[-1]).items():
            found.setdefault((cell, name, cache), []).append(seconds)
    rows = []
    for (cell, name, cache), seconds in found.items():
        if name == "plain":
            continue
        ours, plain = (
            {key: min(s[key] for s in some) for key in some[0]} for some in (seconds, found[cell, "plain", cache])
        )
        row = {"model": name, "case": cell, "cache": cache, **ours}
        row |= {f"plain_{key}": value for key, value in plain.items()}
        row["ratio"] = round(plain["wall_s"] / ours["wall_s"], 3)
        row["processor_ratio"] = round(plain["processor_s"] / ours["processor_s"], 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_json(parser)
    parser.add_argument("--once", nargs=2, metavar=("MODEL", "PROGRAM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(once(*arguments.once)))
        return
    rows = measured()
    show("compile", rows)
    save("compile", rows, arguments.json)


if __name__ == "__main__":
    main()
