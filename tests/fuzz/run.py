"""Runs many random programs in several processes, and writes what differed as JSON.

    PYTHONPATH=. python -m tests.fuzz.run --programs 600 --processes 13 --json fuzz.json

Of three programs, two have products and row reductions, which become kernels, and one of these the steps of
`tests.fuzz.guests`. `--control plain` leaves out `bijax.invariant`, `--control unfenced` the fences of element-wise
code on a GPU alone. A control is to differ.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax
from rich.console import Console
from rich.progress import track

import bijax
from benchmarks.harness import commit, device_words
from bijax.transform.gpu import fences as gpu_fences
from tests.fuzz.programs import Fuzz, differences

_CACHES_KEPT: Final = 8  # programs between two that start with empty caches, for memory's sake


@contextlib.contextmanager
def unfenced() -> Iterator[None]:
    """Lowers element-wise code for a GPU as JAX does."""

    def stock(_: str, rule: Any, ctx: Any, operands: Any, parameters: Any) -> Any:
        return list(rule(ctx, *operands, **parameters))

    with mock.patch.object(gpu_fences, "fenced", stock):
        yield


def check(number: int, control: str | None) -> dict[str, Any]:
    """Returns what one program came to.

    Args:
        number: Of the program, which says of what kind it is.
        control: Which control, if any.
    """
    fuzz = Fuzz(number // 3, kernels=number % 3 > 0, guests=number % 3 == 2)
    transform: Callable[[Any], Any] = (lambda f: f) if control == "plain" else bijax.invariant
    start = time.perf_counter()
    with unfenced() if control == "unfenced" else contextlib.nullcontext():
        found = differences(fuzz, transform)
    if number % _CACHES_KEPT == 0:
        jax.clear_caches()
    seconds = round(time.perf_counter() - start, 1)
    kind = {"seed": fuzz.seed, "kernels": fuzz.kernels, "guests": fuzz.guests}
    asked = {**kind, "asked": fuzz.asked, "dtype": fuzz.dtype}
    return {**asked, "differing_elements": {str(size): n for size, n in found.items()}, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs, compiled at several sizes of the batch.")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--control", choices=["plain", "unfenced"])
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for the processes started below
    numbers = range(arguments.first, arguments.first + arguments.programs)
    start = time.perf_counter()
    found = []
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(functools.partial(check, number, arguments.control)) for number in numbers]
        for done in track(as_completed(pending), "programs", len(pending), console=Console(stderr=True)):
            found.append(done.result())
    differing = [result for result in found if result["differing_elements"]]
    result = {
        "programs": len(found),
        "differing": len(differing),
        "control": arguments.control,
        "device": device_words(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "seconds": round(time.perf_counter() - start),
        "processes": arguments.processes,
        "differences": sorted(differing, key=lambda r: (r["seed"], r["kernels"], r["guests"])),
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{len(differing)} of {len(found)} programs differ ({arguments.control or 'bijax.invariant'}): {arguments.json}"
    )


if __name__ == "__main__":
    main()
