"""`jax.jit` with sharded arguments: programs that XLA divides among devices have the bits of one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.tier("full", fault=("some",))
@pytest.mark.parametrize("which", ["some", "everything"])
def test_bits_of_one_device(which: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "tests.transform.sharded_arguments", which]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "held\n"
