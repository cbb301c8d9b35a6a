"""Which tests run: those of the requested tiers, and GPU tests where there is a GPU; what processes share."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

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

# The processes that tests start import the same modules: they are compiled once, not by each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax  # reads the environment

import bijax
from tests import tiers
from tests.mosaic import Races
from tests.tiers import pytest_addoption as pytest_addoption
from tests.tiers import pytest_pycollect_makeitem as pytest_pycollect_makeitem

# Programs in memory are many objects, and few of them garbage: looking through them as often as Python does by default
# takes a tenth of the time to collect the tests.
gc.set_threshold(50_000)

MAX_ID = 60
"""Length of the ids that are made of values."""


@pytest.fixture(scope="module")
def hopper() -> Iterator[None]:
    """Programs for CUDA are lowered for Hopper where there is no GPU, for this machine's GPU where there is one."""
    with contextlib.nullcontext() if jax.default_backend() == "gpu" else bijax.lowering_for("sm_90"):
        yield


@pytest.fixture
def races(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Races:
    """Counts the races that Mosaic's interpreter printed (JAX 0.11) or logged (0.12)."""
    return lambda: ("".join(capfd.readouterr()) + caplog.text).count("RACE DETECTED")


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


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, Any, list[pytest.Collector]]:
    """Modules of tests have no doctests: those that are programs of their own are not imported to look for some."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Returns an id that says what a collection holds: pytest numbers them, and a new case would move the others."""
    if isinstance(val, tuple | list | dict) and is_plain(val) and len(str(val)) <= MAX_ID:
        return str(val)
    return None


def is_plain(val: object) -> bool:
    if isinstance(val, tuple | list | dict):
        return all(map(is_plain, val.values() if isinstance(val, dict) else val))
    return val is None or isinstance(val, str | int | float)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.deselect(config, items)
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU, this process runs on {jax.default_backend()}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
