"""The notebooks run, and the outputs that are stored in them are whole."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execute import ROOT, execute

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


# Pages of the documentation, tests/transform, tests/layers and tests/serving run the same functions.
@pytest.mark.tier("full")
def test_runs(notebook: Path) -> None:
    # A cell that fails, by an assert for example, raises an error here.
    cells = execute(notebook).cells
    streams = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs if o.output_type == "stream"]
    assert not [o.text for o in streams if o.name == "stderr"]


def test_stored_outputs(notebook: Path) -> None:
    stored = nbformat.read(notebook, as_version=4)
    nbformat.validate(stored)
    assert stored.metadata.kernelspec.name == "python3"
    cells = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [cell.id for cell in cells if cell.metadata]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_no_machine_in_the_file(notebook: Path) -> None:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("image/png", None)
    text = json.dumps(content)
    assert not re.findall(r"(?<![\w.])/(?:home|root|Users|tmp|opt|usr|work|mnt|private)/[^\s\"]*", text)
    assert not [name for name in (str(ROOT), sys.prefix, os.path.expanduser("~")) if f"{name}/" in text]


def test_runs_in_this_interpreter(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("import sys, bijax\nprint(sys.executable)\nprint(bijax.__file__)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "where.ipynb")
    printed = execute(tmp_path / "where.ipynb").cells[0].outputs[0].text.split("\n")
    assert printed[:2] == [sys.executable, str(ROOT / "bijax/__init__.py")]
