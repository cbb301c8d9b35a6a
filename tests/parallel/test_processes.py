"""Several processes (`jax.distributed`, Gloo on a CPU): the bits of one process, and processes that disagree."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.parallel import _processes, check_processes
from tests.fake_devices import ROOT, free_port

RESULTS = ("products", "gradients", "sums")


def outputs(processes: int) -> list[list[str]]:
    """Returns the lines of results that each process prints; together they have four devices."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}",
    }
    command = [sys.executable, "-m", "tests.parallel.processes", str(free_port()), str(processes)]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen([*command, str(number)], cwd=ROOT, env=environment, **pipes) for number in range(processes)
    ]
    try:
        done = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(p.returncode == 0 for p in started), "\n".join(errors[-3000:] for _, errors in done)
    # Gloo prints lines of its own.
    return [[line for line in printed.splitlines() if line.startswith(RESULTS)] for printed, _ in done]


@pytest.mark.tier("full")
def test_two_processes_have_the_bits_of_one() -> None:
    [one], two = outputs(1), outputs(2)
    assert tuple(line.split()[0] for line in one) == RESULTS
    assert two == [one, one]


def test_processes_that_disagree_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the digests of three processes, of which two have other weights."""
    check_processes(weights={"a": jnp.ones(3), "b": 2}, contracts="x")
    gathered: list[list[bytes]] = []

    def of_three(digests: list[bytes]) -> list[list[bytes]]:
        gathered.append(digests)
        return [[d, d, d] if len(gathered) == 1 or i == 0 else [d, b"other", b"another"] for i, d in enumerate(digests)]

    monkeypatch.setattr(_processes, "_gathered", of_three)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ValueError, match=r"all 3 processes, got other weights in processes 1, 2 \(sha256 ") as error:
        check_processes(weights=np.ones(3), contracts="x")
    assert "contracts" not in str(error.value)
    assert [len(digests) for digests in gathered] == [1, 2]


def test_digests_tell_bits_dtypes_and_structure_apart() -> None:
    different = [
        np.zeros(4, np.float32), -np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32),
        [0.0], (0.0,), {"a": 0.0}, {"b": 0.0}, "0", 0, np.zeros(1, int), np.zeros((0, 2)), jnp.zeros(4, jnp.bfloat16),
    ]  # fmt: skip
    digests = [_processes._digest("x", value) for value in different]
    assert len(set(digests)) == len(different)
    assert _processes._digest("x", jnp.zeros(4)) == digests[0]
    with pytest.raises(TypeError, match=r"options\['a'\] must be a string, a number or an array, got object"):
        check_processes(options={"a": object()})
