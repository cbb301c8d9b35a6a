"""`bijax demo --quick`: no difference with bijax, some with plain JAX."""

import json

import pytest

from bijax import cli
from tests.exhaustive import rarely
from tests.layers import checkpoint_files as files


@pytest.mark.parametrize("real", [False, rarely(True)], ids=["tiny model in two ways", "real model"])
def test_the_quick_demo(real, tmp_path, capsys, monkeypatch):
    picture, figures = tmp_path / "picture.png", tmp_path / "figures.json"
    arguments = ["demo", "--quick", "--tokens", "4", "--picture", str(picture), "--json", str(figures)]
    if not real:
        monkeypatch.setattr("bijax.demo.ways.QUICK_BATCH_SIZES", (5,))
        monkeypatch.setattr("bijax.demo.ways.QUICK_CHUNKS", (7,))
        fields = {**files.hf_fields(), "max_position_embeddings": 512}
        arguments += ["--model", str(files.write_folder(tmp_path / "model", fields))]
    code = cli.main(arguments)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    plain, bijax = json.loads(figures.read_text())["sides"]
    # The control: the same comparison finds the differences that there are.
    assert plain["total"]["tokens_differing"] > 0
    assert bijax["total"]["tokens_differing"] == bijax["total"]["texts_differing"] == 0
    assert bijax["total"]["tokens"] == plain["total"]["tokens"] > 0
