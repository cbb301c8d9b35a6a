"""Which tests run: exhaustive ones if asked for, GPU tests where there is a GPU, which several processes share."""

import contextlib
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # reads the environment

import bijax


@pytest.fixture(scope="module")
def hopper() -> Iterator[None]:
    """Programs for CUDA are lowered for Hopper where there is no GPU, for this machine's GPU where there is one."""
    with contextlib.nullcontext() if jax.default_backend() == "gpu" else bijax.lowering_for("sm_90"):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests that are marked exhaustive too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU, this process runs on {jax.default_backend()}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
