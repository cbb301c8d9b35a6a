"""The gallery: its programs have equal bits at every size, and its figures are those of the programs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import RESULTS, cells, read
from tests.docs.pages import ROOT
from tests.tiers import full_only

FIGURES = cells(read(RESULTS / "gallery_cpu.json"))
LIBRARIES = (
    *("blackjax", "diffrax", "distrax", "e3nn_jax", "equinox", "flowjax", "haiku", "jax_md", "jraph", "lineax", "mctx"),
    *("numpyro", "optax", "optimistix", "pgx", "tinygp"),
)


def test_no_figure_shows_a_change() -> None:
    assert len(FIGURES) >= 25
    assert [f["program"] for f in FIGURES if f["differing"]] == []
    # The same comparison finds what plain JAX changes.
    assert any(f["differing_plain"] for f in FIGURES)


@pytest.mark.parametrize("program", [full_only(f["program"]) for f in FIGURES], ids=[f["program"] for f in FIGURES])
def test_bits_do_not_follow_the_batch(program: str, tmp_path: Path) -> None:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the extra gallery; not installed: {', '.join(missing)}")
    result = tmp_path / "gallery.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gallery",
        "--seconds",
        "0.1",
        "--json",
        str(result),
        "--programs",
        program,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cells(read(result))[0]["differing"] == 0
