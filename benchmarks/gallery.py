"""Programs of other libraries, plain and under `bijax.invariant`: which bits follow the batch, and what it costs.

Each program runs in a process of its own, so that the first call is that of a new process. The time of a first call is
that of tracing, lowering, compiling and running it once; bijax compares the forms of a product with its contract then.
`docs/gallery.md` shows the figures of `benchmarks/results`.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gallery_programs import EXAMPLES, Program, programs, take
from harness import cell, interleaved_us, record, show, write
from rich.console import Console
from rich.progress import track

import bijax
from bijax.testing import bits

SIZES = (2, 3, 8)
"""Sizes of the batches that are compared with each example alone."""


def first_s(fn: Callable[[Any], Any], batch: Any) -> float:
    """Returns the time of the first call with these shapes, in seconds."""
    start = time.perf_counter()
    jax.block_until_ready(fn(batch))
    return time.perf_counter() - start


def differing(fn: Callable[[Any], Any], batch: Any) -> int:
    """Returns how many examples have other bits in a batch than alone, over all sizes."""
    singles = [jax.tree.leaves(fn(take(batch, slice(i, i + 1)))) for i in range(EXAMPLES)]
    alone = [np.concatenate([bits(part) for part in parts]) for parts in zip(*singles, strict=True)]
    found = 0
    for size in SIZES:
        together = [bits(leaf) for leaf in jax.tree.leaves(fn(take(batch, slice(size))))]
        changed = [(t != a[:size]).reshape(size, -1).any(1) for t, a in zip(together, alone, strict=True)]
        found += int(np.any(changed, axis=0).sum())
    return found


def measure(program: Program, seconds: float) -> dict[str, Any]:
    """Returns the figures of one program."""
    fn, batch = program.make()
    plain, invariant = jax.jit(fn), jax.jit(bijax.invariant(fn))
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))  # what JAX itself does once in a process
    first = [first_s(f, batch) for f in (plain, invariant)]
    another = [first_s(f, take(batch, slice(3))) for f in (plain, invariant)]
    plain_us, invariant_us = interleaved_us([lambda: plain(batch), lambda: invariant(batch)], seconds=seconds)
    return {
        **cell(invariant_us, plain_us, program=program.name, batch=EXAMPLES),
        "differing_plain": differing(plain, batch),
        "differing": differing(invariant, batch),
        "compared": sum(SIZES),
        "first_call_s": round(first[1], 2),
        "first_call_plain_s": round(first[0], 2),
        "another_size_s": round(another[1], 2),
        "another_size_plain_s": round(another[0], 2),
    }


def in_a_process(program: Program, seconds: float) -> dict[str, Any]:
    """Measures one program in a new process, which imports the libraries of its module alone."""
    module = program.make.__module__.rpartition(".")[2]
    command = [sys.executable, __file__, "--one", module, program.name, "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Runs all programs; the exit code is 1 if a bit differed under `bijax.invariant`."""
    parser = argparse.ArgumentParser(description="Programs of other libraries, plain and under bijax.invariant.")
    parser.add_argument("--programs", nargs="*", metavar="NAME", help="some of the programs")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to time each program")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: benchmarks/results)")
    parser.add_argument("--one", nargs=2, metavar=("MODULE", "NAME"), help="print the figures of one, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        module, name = arguments.one
        print(json.dumps(measure(programs(module)[name], arguments.seconds)))
        return 0
    known = programs()
    names = arguments.programs or list(known)
    progress = track(names, description="gallery", console=Console(stderr=True))
    result = record("gallery", [in_a_process(known[name], arguments.seconds) for name in progress])
    show(result)
    print(f"written to {write(result, arguments.json)}")
    return int(any(figures["differing"] for figures in result["cells"]))


if __name__ == "__main__":
    sys.exit(main())
