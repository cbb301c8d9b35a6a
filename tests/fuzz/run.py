"""Runs many random programs in several processes, and writes what differed as JSON.

    python -m tests.fuzz.run --programs 600 --processes 13
    python -m tests.fuzz.run --programs 60 --control plain

Of three programs, two have products and row reductions, which become kernels, and one of these the steps of
`tests.fuzz.guests`. `--control plain` leaves out `bijax.invariant`, `--control unfenced` only the fences of
element-wise code on a GPU. Programs must differ under a control.

The file (by default in `benchmarks/results`, in the form of `benchmarks.record`) holds a cell for each range of
programs and each control. A run adds to it, so that many programs can be run in several calls, and results and controls
are in one file.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax
from rich.console import Console
from rich.progress import track

import bijax
from benchmarks import record
from benchmarks.harness import add_json, device_name, save
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
    error = {}
    try:
        with unfenced() if control == "unfenced" else contextlib.nullcontext():
            found = differences(fuzz, transform)
    except Exception as raised:  # the other programs go on; the run ends with exit code 1
        found, error = {}, {"error": f"{type(raised).__name__}: {raised}"[:500]}
    if number % _CACHES_KEPT == 0:
        jax.clear_caches()
    seconds = round(time.perf_counter() - start, 1)
    kind = {"seed": fuzz.seed, "kernels": fuzz.kernels, "guests": fuzz.guests}
    asked = {**kind, "asked": fuzz.asked, "dtype": fuzz.dtype}
    return {**asked, "differing_elements": {str(size): n for size, n in found.items()}, "seconds": seconds, **error}


def overlapping(path: Path, numbers: range, control: str | None) -> list[range]:
    """Returns the ranges of a file that have programs of `numbers`, but are not the same, under the same control."""
    if not path.exists():
        return []
    cells = [cell for cell in record.cells(record.read(path)) if cell["control"] == control]
    held = [range(cell["first"], cell["first"] + cell["programs"]) for cell in cells]
    return [one for one in held if one != numbers and max(one[0], numbers[0]) <= min(one[-1], numbers[-1])]


def summarised(
    found: Sequence[dict[str, Any]], numbers: range, control: str | None, seconds: float, processes: int
) -> dict[str, Any]:
    """Returns the cell of a run."""
    differing = [result for result in found if result["differing_elements"]]
    failed = [result for result in found if "error" in result]
    return {
        "control": control,
        "first": numbers.start,
        "programs": len(found),
        "differing": len(differing),
        "failed": len(failed),
        "seconds": round(seconds),
        "processes": processes,
        "differences": sorted(differing, key=_order),
        "failures": sorted(failed, key=_order),
    }


def _order(result: dict[str, Any]) -> tuple[int, bool, bool]:
    return result["seed"], result["kernels"], result["guests"]


def main() -> int:
    """Runs the programs; the exit code is 1 if one failed, or if one differs that is no control."""
    parser = argparse.ArgumentParser(description="Random programs, compiled at several sizes of the batch.")
    parser.add_argument("--programs", type=int, default=100, help="number of programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 2) - 3), help="processes that run them"
    )
    parser.add_argument(
        "--control", choices=["plain", "unfenced"], help="plain JAX, or without fences: programs whose bits must differ"
    )
    add_json(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for the processes started below
    numbers = range(arguments.first, arguments.first + arguments.programs)
    path = arguments.json or record.RESULTS
    path = path if path.suffix == ".json" else path / f"programs_{device_name()}.json"
    if others := overlapping(path, numbers, arguments.control):
        parser.error(f"{path} has programs {others[0]} already: choose others, or the same range to replace them")
    start = time.perf_counter()
    found = []
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(functools.partial(check, number, arguments.control)) for number in numbers]
        for done in track(as_completed(pending), "programs", len(pending), console=Console(stderr=True)):
            found.append(done.result())
    cell = summarised(found, numbers, arguments.control, time.perf_counter() - start, arguments.processes)
    save("programs", [cell], path)
    kind = arguments.control or "bijax.invariant"
    print(f"{cell['differing']} of {len(found)} programs differ ({kind}), {cell['failed']} failed")
    return int(bool(cell["failed"] or (cell["differing"] and arguments.control is None)))


if __name__ == "__main__":
    raise SystemExit(main())
