"""Runs the tests that need a GPU, and writes how many passed: `benchmarks/results/tests_MACHINE.json`.

    python -m benchmarks.gpu_tests --processes 16
    python -m benchmarks.gpu_tests --processes 16 tests/matmul/test_gpu.py tests/rows/test_gpu.py

Each path is a cell, so that the files can be run in several calls. Without paths, each file `test_*gpu.py` is one, and
`tests/goldens` another. The exit code is 1 if a test failed or a path had no test.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.harness import add_json, save

ROOT = Path(__file__).parents[1]


def counts(report: Path) -> dict[str, int]:
    """Returns the numbers of tests of a JUnit report."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": tests - failed - errors - skipped, "failed": failed, "errors": errors, "skipped": skipped}


def run(path: str, processes: int) -> dict[str, Any]:
    """Runs the tests of a path; returns its cell."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), f"--junitxml={report}", path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = counts(report) if report.exists() else {"passed": 0, "failed": 0, "errors": 1, "skipped": 0}
    if found["failed"] or found["errors"]:
        print(done.stdout[-4000:], done.stderr[-1000:], flush=True)
    reasons = sorted(set(re.findall(r"SKIPPED \[\d+\] \S+: (.+)", done.stdout)))
    cell = {"tests": path, **found, "seconds": round(time.monotonic() - start), "processes": processes}
    return cell | ({"skipped_because": reasons} if reasons else {})


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests that need a GPU.")
    parser.add_argument("paths", nargs="*", help="test files or folders")
    parser.add_argument("--processes", type=int, default=8)
    add_json(parser)
    arguments = parser.parse_args()
    files = sorted((ROOT / "tests").rglob("test_*gpu.py"))
    paths = arguments.paths or [*(str(file.relative_to(ROOT)) for file in files), "tests/goldens"]
    cells = []
    for path in paths:
        cells.append(run(path, arguments.processes))
        print(cells[-1], flush=True)
        save("tests", cells, arguments.json)  # after each path
    return int(any(cell["failed"] or cell["errors"] or not cell["passed"] for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
