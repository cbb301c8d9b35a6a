"""The transform with `shard_map`, `psum` and sharded arrays, in a process with two devices."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.tiers import full_only

ROOT = pathlib.Path(__file__).parents[2]


ALL = ["psum", "psum dx outside", "psum dx inside", "psum dw inside"]


@pytest.mark.parametrize("names", [[], full_only(ALL)], ids=["cut batches", "and sums over devices"])
def test_two_devices(names: list[str]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-m", "tests.transform.matrix_devices", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*names, "one device"]
