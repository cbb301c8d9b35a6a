"""Golden hashes: the bits of every operation under its contracts, in `tests/goldens.json`.

    python -m tests.goldens.hashes            what is missing, and what differs
    python -m tests.goldens.hashes --record   writes what is missing; what differs stays, and is an error

A hash changes by decision only: raise the version of the contract, which is in the key, and record again. Hashes belong
to a machine (`tests/goldens/machine.py`): to the architecture of a GPU or of a processor, and, where XLA's functions
take part, to a version of jaxlib.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np

import bijax
from tests.goldens.cases import Case, cases
from tests.goldens.machine import machine_of

FILE: Final = Path(__file__).parents[1] / "goldens.json"
RECORD: Final = "python -m tests.goldens.hashes --record"


class Golden(NamedTuple):
    """What is known of a case on this machine.

    Attributes:
        machine: What its bits belong to.
        key: Its name and its contracts.
        digest: A hash of its bits.
    """

    machine: str
    key: str
    digest: str


def load() -> dict[str, dict[str, str]]:
    """Returns the recorded hashes by machine and key."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def golden(name: str, case: Case) -> Golden:
    """Runs a case."""
    with jax.enable_x64(case.wide):
        function = bijax.invariant(case.function)
        manifest = bijax.contracts(function, *case.arrays)
        compiled = jax.jit(function).lower(*case.arrays).compile()
        results = compiled(*case.arrays)
    return Golden(machine_of(manifest, compiled.as_text()), " | ".join([name, *manifest.ids]), digest(results))


def digest(results: Any) -> str:
    """Returns a hash of the bits of arrays."""
    return hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in jax.tree.leaves(results))).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    arguments = parser.parse_args()
    known, differ, missing = load(), [], 0
    for name, case in cases().items():
        if arguments.only not in name:
            continue
        machine, key, found = golden(name, case)
        was = known.get(machine, {}).get(key)
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
