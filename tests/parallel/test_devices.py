"""Bits on 1, 2, 4 and 8 devices, in a process of its own, which has eight devices of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import full_only

ROOT = Path(__file__).parents[2]

FAST = ("products", "bad input", "fingerprints")
OTHERS = (
    ("sums", "weights of leaves", "gradients"),
    ("vocabulary", "lowering for Hopper", "gradients without types"),
    ("experts", "experts on any number of devices"),
    ("products with cut rows",),
    ("products in bfloat16",),
    ("products of huge numbers", "leaves of 11008, 8960 and 6912"),
)


@pytest.mark.parametrize("names", [FAST, *map(full_only, OTHERS)], ids=lambda names: names[0])
def test_bits_do_not_depend_on_the_number_of_devices(names: tuple[str, ...]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "tests.parallel.on_devices", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == list(names)
