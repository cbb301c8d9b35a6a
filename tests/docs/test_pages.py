"""Every block of the documentation runs and prints what the page says; links lead somewhere."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import GPU, ROOT, Block, blocks, commands

DOCS = ROOT / "docs"
BUILT = ("generated", "modules", "notebooks")  # by `make docs`
PAGES = sorted(p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).parts[0] not in BUILT)
GUIDES = [p for p in PAGES if p.parent.name in ("guide", "reference") or p.stem in ("index", "install", "gallery")]
RUNNABLE = [p for p in PAGES if any(not b.not_run and b.language in ("python", "console") for b in blocks(p))]
FOR_A_GPU = [p for p in PAGES if any(b.not_run == GPU for b in blocks(p))]
LANGUAGES = {"python", "console", "text"}
# Tests of the same functions run anyway.
_LONG = ("attention", "audit", "devices", "gradients", "hybrids", "latent-attention", "layers", "model")
LONG = [DOCS / "guide" / f"{page}.md" for page in _LONG]
SHORT = [p for p in RUNNABLE if p not in LONG]
DIRECTIVES = {
    "{eval-rst}",
    "{include}",
    "{image}",
    "{toctree}",
    "{note}",
    "{public-members}",
    "{page-summary}",
    "{code-block}",
}


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def run_pages(folder: Path, *arguments: Path | str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.pages", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.tier("full", fast=("short pages",))
@pytest.mark.parametrize("pages", [SHORT, *([page] for page in LONG)], ids=["short pages", *map(name, LONG)])
def test_blocks_run(pages: list[Path], tmp_path: Path) -> None:
    """Each page in a process of its own, those that come together after one import of the libraries."""
    run_pages(tmp_path, *pages)


@pytest.mark.gpu
@pytest.mark.parametrize("page", FOR_A_GPU, ids=name)
def test_blocks_for_a_gpu_run(page: Path, tmp_path: Path) -> None:
    run_pages(tmp_path, page, "--gpu")


def test_the_guides_are_run() -> None:
    assert {"index.md", "install.md", "guide/model.md", "guide/audit.md"} <= {name(p) for p in RUNNABLE}
    assert {"install.md", "guide/gpu.md"} <= {name(p) for p in FOR_A_GPU}


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_blocks_have_a_known_language(page: Path) -> None:
    for block in blocks(page):
        kind = block.language.split(" ")[0]
        assert kind in LANGUAGES | DIRECTIVES, f"{name(page)}:{block.line}: {block.language!r}"
        # A text is compared only after the block that prints it.
        assert block.language != "text", f"{name(page)}:{block.line}: nothing prints this"


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```text\n2\n```\n")
    run = [sys.executable, "-m", "tests.docs.pages", str(page)]
    done = subprocess.run(
        run, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "page.md:2" in done.stderr


def shell_commands() -> list[tuple[str, str]]:
    consoles: list[tuple[Path, Block]] = [(p, b) for p in PAGES for b in blocks(p) if b.language == "console"]
    return [(f"{name(page)}:{block.line}", command) for page, block in consoles for command, _ in commands(block)]


def test_commands_name_extras_and_targets_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = shell_commands()
    assert found
    for where, command in found:
        for extra in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extra.split(",")) <= set(extras), where
        if command.startswith("make "):
            assert command.split()[1] in targets, where


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        notebook = ROOT / "notebooks" / Path(target).name  # `make docs` copies them next to the pages
        assert (page.parent / target).exists() or notebook.exists(), f"{page.name}: {target}"
