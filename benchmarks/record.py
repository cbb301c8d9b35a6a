"""Files of results: their form, merging, and checks. Needs the standard library alone.

    python -m benchmarks.record add FILE ...   # merge files of another machine into benchmarks/results
    python -m benchmarks.record list           # every part, and how many commits ago it was measured
    python -m benchmarks.record check          # what is wrong with the files in benchmarks/results

A file has the name `BENCHMARK_MACHINE.json` and holds

- `parts`: runs of the one script that writes the file. A part has `device`, `versions`, `date`, `commit`, `clean`
  (whether the tree had no uncommitted change) and its `cells`; `rerun` is the reason why it is to be measured again.
- `geomean` and `worst` of the cells' `ratio`, if they have one.

`ratio` has one meaning in all files: the time of the other side (XLA, plain JAX, cuDNN) over ours. Above 1, ours is
faster. A script that is called again adds to its file: a cell replaces the one with the same key, whatever part that is
in, so that a benchmark can be measured in several calls, and no file is edited by hand.
"""

import argparse
import json
import math
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
PART: Final = ("device", "versions", "date", "commit", "clean")
"""The fields of every part, apart from its cells."""

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "attention_bf16": ("what", "batch", "keys", "heads", "key_heads", "size"),
    "attention_bf16_jax_triton": ("what", "batch", "keys", "heads", "key_heads", "size"),
    "compile": ("model", "case", "cache"),
    "decode_bf16": ("layers", "model", "batch", "keys"),
    "decode_smollm2": ("batch",),
    "delta_rule_bf16": ("what", "sequences", "tokens"),
    "demo": ("what", "side", "way", "prompt"),
    "elementwise": ("operations", "op", "dtype", "mebibytes"),
    "engine": ("layers",),
    "engine_rows": ("operator", "tokens", "columns"),
    "engine_smollm2": ("requests", "longest"),
    "first_call": ("model", "case", "cache"),
    "float8_matmul": ("m", "k", "n", "weights"),
    "fused_bf16": ("case", "m", "k", "n"),
    "gallery": ("program",),
    "group_matmul": ("layer", "experts", "rows", "load"),
    "hybrid_bf16": ("layers", "model", "case"),
    "latent_bf16": ("what", "sequences", "queries", "heads", "latents"),
    "linalg": ("function", "dtype", "n", "batch"),
    "linear_bf16": ("case", "x", "w", "what"),
    "loss_bf16": ("rows", "width", "words"),
    "matmul_bf16": ("m", "k", "n"),
    "matmul_bf16_jax_triton": ("m", "k", "n"),
    "matmul_f16": ("m", "k", "n"),
    "matmul_f32": ("m", "k", "n", "transpose_w", "precision"),
    "model_bf16": ("layers", "model", "case", "params", "remat"),
    "model_bf16_jax_triton": ("layers", "model", "case", "params", "remat"),
    "moe_layer": ("layer", "dtype", "tokens"),
    "parallel": ("what", "shape", "case", "devices"),
    "overlap": ("case", "program"),
    "programs": ("control", "first"),
    "quant_matmul": ("m", "k", "n", "weights"),
    "reliability": ("what", "engine"),
    "rows": ("op", "rows", "columns", "dtype"),
    "rows_jax_triton": ("op", "rows", "columns", "dtype"),
    "sampling": ("rows", "temperature", "peak"),
    "tests": ("tests",),
    "transform_smollm2": ("what", "batch"),
    "trees": ("case",),
}
"""What identifies a cell, by benchmark. A field may be missing from a cell."""

Result = dict[str, Any]
Cell = dict[str, Any]


def part(
    cells: Sequence[Cell], *, device: str, versions: dict[str, str], date: str, commit: str, clean: bool, **more: Any
) -> dict[str, Any]:
    """Returns a part; `more` are figures of the run as a whole."""
    head = {"device": device, "versions": versions, "date": date, "commit": commit, "clean": clean}
    return {**head, **more, "cells": list(cells)}


def merged(benchmark: str, parts: Sequence[dict[str, Any]], old: Result | None = None) -> Result:
    """Returns the object of a file to which parts are added.

    Args:
        benchmark: Its name, one of `KEYS`.
        parts: New parts.
        old: The object of the file that exists.

    Raises:
        ValueError: If the file belongs to another benchmark.
    """
    kept = [dict(one) for one in old["parts"]] if old else []
    if old and old["benchmark"] != benchmark:
        raise ValueError(f"expected a file of {benchmark}, got one of {old['benchmark']}.")
    key = KEYS[benchmark]
    for new in parts:
        again = {_identity(cell, key): cell for cell in new["cells"]}
        same = next((one for one in kept if _head(one) == _head(new)), None)
        for one in kept:
            if one is same:
                one["cells"] = [again.pop(_identity(cell, key), cell) for cell in one["cells"]]
            else:
                one["cells"] = [cell for cell in one["cells"] if _identity(cell, key) not in again]
        if same is None:
            kept.append(dict(new))
        else:
            same |= {name: value for name, value in new.items() if name != "cells"}
            same["cells"] = [*same["cells"], *again.values()]
    kept = [one for one in kept if one["cells"]]
    result = {"benchmark": benchmark, "parts": kept}
    return {**result, **summary([cell for one in kept for cell in one["cells"]])}


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    """Returns the geometric mean and the least of the cells' ratios, nothing if there are none."""
    ratios = [cell["ratio"] for cell in cells if "ratio" in cell]
    if not ratios:
        return {}
    return {"geomean": round(math.exp(statistics.fmean(map(math.log, ratios))), 3), "worst": round(min(ratios), 3)}


def read(path: Path) -> Result:
    """Returns the object of a file."""
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    return found


def cells(result: Result) -> list[Cell]:
    """Returns the cells of all parts."""
    return [cell for one in result["parts"] for cell in one["cells"]]


def write(result: Result, path: Path) -> None:
    """Writes a file, with a line for each cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for one in result["parts"]:
        head = json.dumps({name: value for name, value in one.items() if name != "cells"})
        lines = ",\n    ".join(map(json.dumps, one["cells"]))
        parts.append(f'  {head[:-1]}, "cells": [\n    {lines}\n  ]}}')
    head = json.dumps({"benchmark": result["benchmark"]})
    tail = "".join(f', "{name}": {result[name]}' for name in ("geomean", "worst") if name in result)
    path.write_text(f'{head[:-1]}, "parts": [\n' + ",\n".join(parts) + f"\n]{tail}}}\n", encoding="utf-8")


def add(path: Path, folder: Path = RESULTS) -> Path:
    """Merges a file into the one of its name in a folder; returns where that is."""
    new, target = read(path), folder / path.name
    old = read(target) if target.exists() else None
    write(merged(new["benchmark"], new["parts"], old), target)
    return target


def faults(path: Path) -> Iterator[str]:
    """Yields what is wrong with a file."""
    result = read(path)
    if path.stem.rpartition("_")[0] != result["benchmark"]:
        yield f"{path.name} is of the benchmark {result['benchmark']}"
    key = KEYS[result["benchmark"]]
    found: set[str] = set()
    for one in result["parts"]:
        for name in PART:
            if name not in one:
                yield f"{path.name}: a part has no {name}"
        if "-dirty" in one["commit"]:
            yield f"{path.name}: the commit is {one['commit']}: write `clean`: false"
        if not one["clean"] and "rerun" not in one:
            yield f"{path.name}: a part of {one['commit']} with uncommitted changes does not say `rerun`"
        for cell in one["cells"]:
            identity = _identity(cell, key)
            if identity in found:
                yield f"{path.name}: two cells {identity}"
            found.add(identity)
    expected = summary(cells(result))
    if expected != {name: result[name] for name in ("geomean", "worst") if name in result}:
        yield f"{path.name}: expected {expected}"


def _identity(cell: Cell, key: Sequence[str]) -> str:
    return json.dumps([cell.get(name) for name in key])


def _head(one: dict[str, Any]) -> list[Any]:
    return [one[name] for name in PART]


def _age(commit: str) -> str:
    command = ["git", "rev-list", "--count", f"{commit}..HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "?"


def main() -> int:
    """Runs a command; the exit code of `check` is 1 if a file is wrong."""
    parser = argparse.ArgumentParser(description="Files of results.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("add", help="merge files into benchmarks/results").add_argument("files", nargs="+", type=Path)
    commands.add_parser("list", help="show all parts and their age")
    commands.add_parser("check", help="show what is wrong")
    arguments = parser.parse_args()
    paths = sorted(RESULTS.glob("*.json"))
    if arguments.command == "add":
        for path in arguments.files:
            print(add(path))
        return 0
    if arguments.command == "list":
        for path in paths:
            for one in read(path)["parts"]:
                words = f"{one['device']}, {one['date']}, {one['commit']} ({_age(one['commit'])} commits ago)"
                words += "" if one["clean"] else ", uncommitted changes"
                words += f"; to be measured again: {one['rerun']}" if "rerun" in one else ""
                print(f"{path.stem:28s} {len(one['cells']):4d} cells  {words}")
        return 0
    wrong = [fault for path in paths for fault in faults(path)]
    print("\n".join(wrong) or f"{len(paths)} files are in order")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
