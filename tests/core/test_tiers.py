"""Tiers of tests: what is skipped, and which markers are refused."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import FULL_DOCTESTS

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests import tiers
from tests.tiers import pytest_addoption, pytest_pycollect_makeitem

def pytest_collection_modifyitems(config, items):
    tiers.deselect(config, items)
"""

HEAD = """
import pytest
from tests.tiers import full_only, tiered

cases = pytest.mark.parametrize("x", ["a", "b", "c"])
"""

TAKEN = """
@cases
def test_no_marker(x): pass

@pytest.mark.tier("full")
def test_full(): pass

@pytest.mark.tier("full", fast=("a",), fault=("c",))
@cases
def test_named(x): pass

@pytest.mark.tier("fault")
@cases
def test_fault(x): pass

@pytest.mark.parametrize("x", ["a", full_only("b")])
def test_full_case(x): pass

@pytest.mark.parametrize("x", tiered(["a", "b"], fast=["b"]))
def test_tiered(x): pass
"""

RUNS = {
    *("no_marker[a]", "no_marker[b]", "no_marker[c]", "named[a]", "named[c]"),
    *("fault[a]", "fault[b]", "fault[c]", "full_case[a]", "tiered[b]"),
}

REFUSED = {
    "a case that is not there": '@pytest.mark.tier("full", fast=("a", "d"))\n@cases\ndef test(x): pass',
    "a fault that is deferred": '@pytest.mark.tier("fault")\n@pytest.mark.tier("full")\ndef test(): pass',
    "a case of a fault that is deferred": (
        '@pytest.mark.tier("fault")\n@pytest.mark.parametrize("x", [full_only("b")])\ndef test(x): pass'
    ),
    "a fast case that is deferred": (
        '@pytest.mark.tier("full", fast=("b",))\n@pytest.mark.parametrize("x", [full_only("b")])\ndef test(x): pass'
    ),
    "another tier": '@pytest.mark.tier("slow")\ndef test(): pass',
    "a text for names": '@pytest.mark.tier("full", fast="abc")\n@cases\ndef test(x): pass',
    "names among cases that all run": '@pytest.mark.tier("fast", fast=("a",))\n@cases\ndef test(x): pass',
    "a parameter that is not there": '@pytest.mark.parametrize("x", tiered(["a"], fast=["b"]))\ndef test(x): pass',
}


def collect(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = tier\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_taken.py").write_text(HEAD + TAKEN)
    found = {line.partition("::test_")[2] for line in collect(tmp_path).splitlines() if "::" in line}
    assert found == RUNS
    assert "14 tests collected" in collect(tmp_path, "--exhaustive")


def test_what_is_refused(tmp_path: Path) -> None:
    for i, source in enumerate(REFUSED.values()):
        (tmp_path / f"test_{i}.py").write_text(HEAD + source)
    output = collect(tmp_path)
    passed = [name for i, name in enumerate(REFUSED) if f"ERROR test_{i}.py" not in output]
    assert not passed, output
    assert "expected the cases to be among ['a', 'b', 'c'], got ['d']" in output


@pytest.mark.parametrize("name", sorted(FULL_DOCTESTS))
def test_the_doctests_are_there(name: str) -> None:
    assert ">>>" in pkgutil.resolve_name(name).__doc__
