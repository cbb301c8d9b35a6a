"""Runs checks in a process of their own, in which one CPU is several devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(module: str, *arguments: str, devices: int = 8) -> list[str]:
    """Runs a module of the tests; returns the lines that it prints.

    Args:
        module: Its full name.
        arguments: Arguments of the command line.
        devices: Number of devices.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def free_port() -> int:
    """Returns a port on which several processes can meet."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])
