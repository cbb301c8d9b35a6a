"""Compares the speed and the bits of two trees of the library on one GPU, in one run.

    python -m benchmarks.compare_trees ../before --json OUT

Each tree is imported by a process of its own, which compiles the 40 programs of `compare_cases`. Then every program is
timed in both processes alternately, in several rounds: device times of all kernels (CUPTI). `ratio` is the time of the
other tree over that of this one. `equal_bits` says whether the results have the same bits.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
CHILD: Final = "--child"
CALLS: Final = 10
THREADS: Final = 8


def load(name: str) -> ModuleType:
    """Imports a module next to this file, whatever tree `benchmarks` is found in."""
    spec = importlib.util.spec_from_file_location(f"compared_{name}", HERE / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"expected {name}.py in {HERE}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def serve() -> None:
    """Compiles the programs; then reads numbers of programs from the standard input, and writes their times."""
    import jax
    import numpy as np

    found, clock = load("compare_cases").cases(), load("device_time")

    def compiled(case: Any) -> Any:
        shapes = jax.eval_shape(lambda: case.arguments())
        return jax.jit(lambda *arrays: case.function(*arrays)).lower(*shapes).compile()

    with ThreadPoolExecutor(THREADS) as pool:
        programs = list(pool.map(compiled, found))
    print(json.dumps([case.name for case in found]), flush=True)
    for line in sys.stdin:
        number = int(line)
        arguments = found[number].arguments()
        digest = hashlib.sha256()
        for x in jax.tree.leaves(programs[number](*arguments)):
            digest.update(np.asarray(jax.device_get(x)).tobytes())
        us = clock.device_time_us(programs[number], [tuple(arguments)], CALLS)
        print(json.dumps({"us": us, "bits": digest.hexdigest()}), flush=True)


class Tree:
    """A process that runs the programs of one tree."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        variables = dict(os.environ, PYTHONPATH=path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        command = [sys.executable, str(HERE / "compare_trees.py"), CHILD]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=folder, env=variables, **pipes)

    def read(self) -> Any:
        """Returns what the process says next.

        Raises:
            RuntimeError: If the process ended.
        """
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"expected a result, got the end of process {self._process.pid}.")
        return json.loads(line)

    def ask(self, number: int) -> dict[str, Any]:
        """Runs and times a program."""
        if self._process.stdin:
            print(number, file=self._process.stdin, flush=True)
        found: dict[str, Any] = self.read()
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def trees(*folders: Path) -> Iterator[list[Tree]]:
    started: list[Tree] = []
    try:
        started += [Tree(folder) for folder in folders]
        yield started
    finally:
        for tree in started:
            tree.close()


def main() -> int:
    from benchmarks.harness import add_json, cell, save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the other tree")
    parser.add_argument("--rounds", type=int, default=5)
    add_json(parser)
    arguments = parser.parse_args()
    with trees(arguments.before.resolve(), HERE.parent) as (before, after):
        names = before.read()
        if names != after.read():
            raise RuntimeError("expected the same programs in both trees.")
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in names]
        equal = [True] * len(names)
        for _ in range(arguments.rounds):
            for number in range(len(names)):
                old, new = before.ask(number), after.ask(number)
                times[number][0].append(old["us"])
                times[number][1].append(new["us"])
                equal[number] &= old["bits"] == new["bits"]
    cells = []
    for name, (old_us, new_us), same in zip(names, times, equal, strict=True):
        cells.append(cell(statistics.median(new_us), statistics.median(old_us), case=name) | {"equal_bits": same})
        print(cells[-1], flush=True)
    mean = math.exp(statistics.fmean(math.log(c["ratio"]) for c in cells))
    print(f"geometric mean {mean:.4f} of {len(cells)} cells, {equal.count(False)} with other bits")
    save("trees", cells, arguments.json)
    return 0 if all(equal) else 1


if __name__ == "__main__":
    if sys.argv[1:] == [CHILD]:
        serve()
    else:
        sys.exit(main())
