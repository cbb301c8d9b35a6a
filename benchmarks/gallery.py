"""Programs of other libraries, plain and under `bijax.invariant`: which bits depend on the batch, and the cost.

Each program runs in a process of its own, so that the first call is that of a new process. The time of a first call is
that of tracing, lowering, compiling and running it once; bijax compares the forms of a product with its contract then.
Further processes make the first call again, with the folder of JAX's compilation cache that the one before has filled.
All times are processor time of all threads, which other work on the machine changes least. `docs/gallery.md` shows the
figures of `benchmarks/results`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import bijax
from benchmarks.gallery_programs import EXAMPLES, Program, programs, take
from benchmarks.harness import add_json, cell, processor_us, save, show
from bijax.testing import bits

SIZES = (2, 3, 8)
"""Sizes of the batches that are compared with each example alone."""


AGAIN = 2
"""How often the first call is made again; the least time counts."""


def first_s(fn: Callable[[Any], Any], batch: Any) -> float:
    """Returns the processor time of the first call with these shapes, in seconds."""
    start = time.process_time()
    jax.block_until_ready(fn(batch))
    return time.process_time() - start


def differing(fn: Callable[[Any], Any], batch: Any) -> int:
    """Returns how many examples have different bits in a batch and alone, over all sizes."""
    singles = [jax.tree.leaves(fn(take(batch, slice(i, i + 1)))) for i in range(EXAMPLES)]
    alone = [np.concatenate([bits(part) for part in parts]) for parts in zip(*singles, strict=True)]
    found = 0
    for size in SIZES:
        together = [bits(leaf) for leaf in jax.tree.leaves(fn(take(batch, slice(size))))]
        changed = [(t != a[:size]).reshape(size, -1).any(1) for t, a in zip(together, alone, strict=True)]
        found += int(np.any(changed, axis=0).sum())
    return found


def forms(program: Program) -> tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], Any]:
    """Returns a program plain and invariant, and its batch."""
    fn, batch = program.make()
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))  # what JAX itself does once in a process
    return (jax.jit(fn), jax.jit(bijax.invariant(fn))), batch


def measure(program: Program, seconds: float) -> dict[str, Any]:
    """Returns the figures of one program."""
    (plain, invariant), batch = forms(program)
    first = [first_s(f, batch) for f in (plain, invariant)]
    another = [first_s(f, take(batch, slice(3))) for f in (plain, invariant)]
    calls = [lambda: plain(batch), lambda: invariant(batch)]
    plain_us, invariant_us = processor_us(calls, seconds=seconds)
    return {
        **cell(invariant_us, plain_us, program=program.name, batch=EXAMPLES),
        "differing_plain": differing(plain, batch),
        "differing": differing(invariant, batch),
        "compared": sum(SIZES),
        "first_call_s": round(first[1], 3),
        "first_call_plain_s": round(first[0], 3),
        "another_size_s": round(another[1], 3),
        "another_size_plain_s": round(another[0], 3),
    }


def first_again_s(program: Program, which: int) -> float:
    """Returns the processor time of the first call of the plain (0) or of the invariant program (1)."""
    both, batch = forms(program)
    return first_s(both[which], batch)


def in_processes(program: Program, seconds: float) -> dict[str, Any]:
    """Measures one program in new processes, which import the libraries of its module alone."""
    module = program.make.__module__.rpartition(".")[2]

    def run(*options: str) -> Any:
        command = [sys.executable, "-m", "benchmarks.gallery", "--one", module, program.name, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        return json.loads(done.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory() as folder:
        cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment = {**os.environ, **cache}
        figures = run("--seconds", str(seconds))
        again = [[run("--again", str(which)) for which in (0, 1)] for _ in range(AGAIN)]
    plain, invariant = (round(min(times), 3) for times in zip(*again, strict=True))
    return {**figures, "first_call_again_s": invariant, "first_call_again_plain_s": plain}


def main() -> int:
    """Runs all programs; the exit code is 1 if a bit differed under `bijax.invariant`."""
    parser = argparse.ArgumentParser(description="Programs of other libraries, plain and under bijax.invariant.")
    parser.add_argument("--programs", nargs="*", metavar="NAME", help="some of the programs")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to time each program")
    add_json(parser)
    parser.add_argument("--one", nargs=2, metavar=("MODULE", "NAME"), help="print the figures of one, as JSON")
    parser.add_argument("--again", type=int, help="with --one: only the first call, plain (0) or invariant (1)")
    arguments = parser.parse_args()
    if arguments.one:
        module, name = arguments.one
        program = programs(module)[name]
        again = arguments.again
        print(json.dumps(measure(program, arguments.seconds) if again is None else first_again_s(program, again)))
        return 0
    known = programs()
    names = arguments.programs or list(known)
    progress = track(names, description="gallery", console=Console(stderr=True))
    cells = []
    for name in progress:
        cells.append(in_processes(known[name], arguments.seconds))
        save("gallery", cells, arguments.json)  # after each one: all of them take half an hour
    show("gallery", cells)
    return int(any(figures["differing"] for figures in cells))


if __name__ == "__main__":
    sys.exit(main())
