"""Programs in a process of their own that runs Triton kernels by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]


def run_interpreted(*arguments: str) -> str:
    """Runs Python with these arguments, and returns what it prints; the test fails if the process does."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout
