"""Which tests run: all of a sweep or a sample of it, and GPU tests where there is a GPU; what processes share."""

import atexit
import contextlib
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Mosaic's interpreter runs a program for each warpgroup, which wait for each other: with fewer threads than programs,
# as on a machine with two cores, they would wait for ever.
os.environ.setdefault("NPROC", "16")
# Which forms of a product and which tiles of attention keep the contract's order is compared once in a run of pytest,
# and a kernel is lowered once: its workers, and the processes that tests start, find what another has found. JAX keeps
# no compiled programs there, so that tests which count compilations count all of them, and nothing outlives the run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="bijax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax  # reads the environment

import bijax
from tests.exhaustive import LONG_DOCTESTS

# Programs in memory are many objects, and few of them garbage: looking through them as often as Python does by default
# takes a tenth of the time to collect the tests.
gc.set_threshold(50_000)


@pytest.fixture(scope="module")
def hopper() -> Iterator[None]:
    """Programs for CUDA are lowered for Hopper where there is no GPU, for this machine's GPU where there is one."""
    with contextlib.nullcontext() if jax.default_backend() == "gpu" else bijax.lowering_for("sm_90"):
        yield


@pytest.fixture(autouse=True)
def _what_is_patched_stays_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that may put code of its own in the place of ours neither keeps anything for other processes nor asks."""
    if "monkeypatch" not in request.fixturenames:
        yield
        return
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests that are marked exhaustive too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        left_out = {item.nodeid for item in items if is_exhaustive(item)} | not_sampled(items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU, this process runs on {jax.default_backend()}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def is_exhaustive(item: pytest.Item) -> bool:
    long = isinstance(item, pytest.DoctestItem) and item.name in LONG_DOCTESTS
    return long or item.get_closest_marker("exhaustive") is not None


def not_sampled(items: list[pytest.Item]) -> set[str]:
    """Returns the cases that a test with the marker `sample` leaves to `--exhaustive`: all but a fixed few."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("exhaustive"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for name, cases in sweeps.items():
        count = cases[0].get_closest_marker("sample").args[0]
        kept = random.Random(name).sample(range(len(cases)), min(count, len(cases)))
        left_out |= {case.nodeid for i, case in enumerate(cases) if i not in kept}
    return left_out
