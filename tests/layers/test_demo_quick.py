"""`bijax demo --quick` on the real model: no difference with bijax, some with plain JAX."""

import json

import pytest

from bijax import cli
from tests.exhaustive import rarely


@pytest.mark.parametrize(("sizes", "chunks"), [((5,), (7,)), rarely((2, 5), (7, None))], ids=["two ways", "all ways"])
def test_the_quick_demo(sizes, chunks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bijax.demo.ways.QUICK_BATCH_SIZES", sizes)
    monkeypatch.setattr("bijax.demo.ways.QUICK_CHUNKS", chunks)
    picture, figures = tmp_path / "picture.png", tmp_path / "figures.json"
    code = cli.main(["demo", "--quick", "--tokens", "4", "--picture", str(picture), "--json", str(figures)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    plain, bijax = json.loads(figures.read_text())["sides"]
    # The control: the same comparison finds the differences that there are.
    assert plain["total"]["tokens_differing"] > 0
    assert bijax["total"]["tokens_differing"] == bijax["total"]["texts_differing"] == 0
    assert bijax["total"]["tokens"] == plain["total"]["tokens"] > 0
