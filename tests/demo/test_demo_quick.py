"""`bijax demo --quick`: no difference with bijax, some with plain JAX."""

import json

import pytest

from bijax import cli
from tests.layers import checkpoint_files as files


@pytest.mark.tier("full")
@pytest.mark.parametrize("real", [False, True], ids=["tiny model", "real model"])
def test_the_quick_demo(real, tmp_path, capsys, monkeypatch):
    picture, figures = tmp_path / "picture.png", tmp_path / "figures.json"
    arguments = ["demo", "--quick", "--tokens", "4", "--picture", str(picture), "--json", str(figures)]
    if not real:
        monkeypatch.setattr("bijax.demo.ways.QUICK_BATCH_SIZES", (5,))
        fields = {**files.hf_fields(), "max_position_embeddings": 512}
        arguments += ["--model", str(files.write_folder(tmp_path / "model", fields))]
    code = cli.main(arguments)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    one, other = (side["total"] for side in json.loads(figures.read_text())["sides"])
    # The control: the same comparison finds the differences that there are.
    assert one["tokens_differing"] > 0
    assert other["tokens_differing"] == other["texts_differing"] == 0
    assert other["tokens"] == one["tokens"] > 0


@pytest.mark.tier("full")
def test_the_quantised_demo(tmp_path, capsys, monkeypatch):
    """The same with int8 linear layers, whose perplexity on a passage is printed next to the float model's."""
    monkeypatch.setattr("bijax.demo.ways.QUICK_BATCH_SIZES", (5,))
    monkeypatch.setattr("bijax.demo.ways.QUICK_PREFILLS", ())
    monkeypatch.setattr("bijax.demo.quality.PASSAGE", "the water comes first to the mill")
    folder = files.write_folder(tmp_path / "model", {**files.hf_fields(), "max_position_embeddings": 512})
    figures = tmp_path / "figures.json"
    places = ["--picture", str(tmp_path / "picture.png"), "--json", str(figures), "--model", str(folder)]
    code = cli.main(["demo", "--quick", "--tokens", "4", "--quantize", "int8", "--dtype", "float32", *places])
    printed = capsys.readouterr().out
    assert code == 0, printed
    found = json.loads(figures.read_text())
    assert found["arguments"]["quantize"] == "int8"
    plain, bijax = found["sides"]
    assert plain["total"]["tokens_differing"] > 0  # the control
    assert bijax["total"]["tokens_differing"] == 0 < bijax["total"]["tokens"]
    before, after = (quality["perplexity"] for quality in found["quality"])
    assert before != after
    assert f"float32 {before:.3f}, int8 {after:.3f}" in printed
    assert repr(found["quality"][1]["text"]) in printed
