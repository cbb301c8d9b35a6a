"""Models that are cut over 1, 2, 4 and 8 devices, in a process of its own, which has eight devices of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import full_only

ROOT = Path(__file__).parents[2]

FAST = ("bad input",)
OTHERS = (
    ("parameters", "layers"),
    ("small", "chunks"),
    ("gradients of Qwen3",),
    ("gradients in bfloat16",),
    ("gradients with shared heads",),
)


@pytest.mark.parametrize("names", [FAST, *map(full_only, OTHERS)], ids=lambda names: names[0])
def test_models_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "tests.layers.partitioned_models", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == list(names)
