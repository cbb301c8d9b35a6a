"""Golden hashes: the bits of every operation under its contracts, in `tests/goldens.json`.

    python -m tests.goldens.hashes            what is missing, and what differs
    python -m tests.goldens.hashes --record   writes what is missing; what differs stays, and is an error

A hash changes by decision only: raise the version of the contract, which is in the key, and record again. Hashes belong
to an architecture (of the GPU, or of the processor); where functions of XLA take part, to a version of jaxlib too.
"""

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Final

import jax
import jaxlib
import numpy as np

import bijax
from pallas_kernels.contract import XLA_FUNCTIONS
from tests.goldens.cases import Case, cases

FILE: Final = Path(__file__).parents[1] / "goldens.json"


def load() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def key_of(name: str, case: Case) -> tuple[str, str]:
    """Returns the machine that the bits of a case belong to, and the case with its contracts."""
    manifest = bijax.contracts(case.function, *case.arrays)
    machine = processor() if manifest.platform == "cpu" else manifest.architecture
    if XLA_FUNCTIONS.id in manifest.ids:
        machine += f", jaxlib {jaxlib.__version__}"
    elif manifest.platform == "cpu":
        machine = platform.machine()
    return machine, " | ".join([name, *manifest.ids])


def processor() -> str:
    """Returns the machine with the vector instructions that XLA's functions are compiled for."""
    info = Path("/proc/cpuinfo")
    return platform.machine() + ("-avx512" if info.exists() and "avx512f" in info.read_text() else "")


def digest(case: Case) -> str:
    results = jax.tree.leaves(jax.jit(case.function)(*case.arrays))
    return hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in results)).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    arguments = parser.parse_args()
    known, differ, missing = load(), [], 0
    for name, case in cases().items():
        if arguments.only not in name:
            continue
        machine, key = key_of(name, case)
        found, was = digest(case), known.get(machine, {}).get(key)
        if was is None:
            missing += 1
            known.setdefault(machine, {})[key] = found
            print(f"not recorded: {machine} | {key}: {found}", flush=True)
        elif was != found:
            differ.append(key)
            print(f"differs: {machine} | {key}: {was} is recorded, {found} is found", flush=True)
    if arguments.record:
        FILE.write_text(json.dumps({m: dict(sorted(v.items())) for m, v in sorted(known.items())}, indent=1) + "\n")
    print(f"{missing} not recorded{' until now' if arguments.record else ''}, {len(differ)} differ")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
