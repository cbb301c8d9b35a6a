"""The picture: its cells and colours, its texts, and the file."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import LogNorm, to_rgba

from bijax.demo.arguments import Arguments
from bijax.demo.colours import DARK, LIGHT
from bijax.demo.compare import Text
from bijax.demo.compute import SideResult, compute_side
from bijax.demo.example import Example, Pair, Pieces, examples
from bijax.demo.heat_map import DIFFERENCES, cells, colour, scale
from bijax.demo.measure import Demo
from bijax.demo.picture import draw_picture
from bijax.demo.picture_texts import _lines
from bijax.demo.ways import Way, alone, other_ways
from tests.demo.demo_fakes import FakeModel, SilentWatcher, shift

PROMPTS = ("one", "two", "three")


def side(disturb=lambda way, batch_size, place, text: text, others=None, tokens=6, name="side") -> SideResult:
    others = others or other_ways(3, seed=0)
    return compute_side(
        name, FakeModel(tokens, disturb), [[1], [2], [3]], alone(3), others, max_new_tokens=tokens,
        watcher=SilentWatcher(),
    )  # fmt: skip


def decode(tokens: np.ndarray) -> str:
    return "".join(f" {token}" for token in tokens)


class Words:
    def decode(self, ids: list[int]) -> str:
        return decode(np.array(ids))


def demo(*sides: SideResult) -> Demo:
    arguments = Arguments(None, PROMPTS, False, 6, "bfloat16", 0, False, None, None, Path("picture.png"))
    found = tuple(examples(sides, PROMPTS, decode, most=2))
    return Demo(arguments, "model", "cpu", (1, 1, 1), sides, found, None, Words())


def test_cells_keep_the_worst_of_every_token():
    def disturb(way, batch_size, place, text):
        if batch_size == 1:
            return text
        tokens = text.tokens.copy()
        if place == 1:
            tokens[2:] = 0
        return Text(tokens, text.logprobs + np.array([1 + place, *[0] * (len(tokens) - 1)], np.float32))

    result = side(disturb, [Way("batch", ((0, 1), (0, 2)))])
    grid = cells(result.ways[0], 3, 6).reshape(3, 6)
    lengths = [len(text.tokens) for text in result.alone]
    assert grid[0, : lengths[0]].tolist() == pytest.approx([1] + [0] * (lengths[0] - 1))
    assert grid[1, : lengths[1]].tolist() == pytest.approx([2, 0] + [np.inf] * (lengths[1] - 2))
    for prompt, length in enumerate(lengths):
        assert np.isnan(grid[prompt, length:]).all()


def test_a_difference_without_distance_is_seen():
    def disturb(way, batch_size, place, text):
        sign = 0.0 if way.name == "alone" else -0.0
        return Text(text.tokens, np.full_like(text.logprobs, sign))

    result = side(disturb, [Way("again", ((0,),))])
    assert np.nanmin(cells(result.ways[0], 3, 6)) > 0


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_colours(scheme):
    norm = LogNorm(0.01, 1, clip=True)
    image = colour(np.array([[0, np.inf, np.nan, 0.01, 1]]), norm, scheme)
    expected = [*map(to_rgba, (scheme.same, scheme.parted, scheme.page)), DIFFERENCES(0.0), DIFFERENCES(1.0)]
    np.testing.assert_array_equal(image[0], expected)


def test_the_scale_holds_the_largest_difference():
    moved = side(lambda way, batch_size, place, text: Text(text.tokens, text.logprobs - 0.25 * (batch_size > 1)))
    assert moved.total.largest_difference == pytest.approx(0.25, rel=1e-5)
    assert (scale([side(), moved]).vmin, scale([moved]).vmax) == (1e-4, 1)
    assert scale([side()]).vmax == 1


def test_examples_part_earliest_first():
    def disturb(way, batch_size, place, text):
        at = {"batches of 4": 2, "batches of 8": 1}.get(way.name)
        tokens = text.tokens.copy()
        if at is not None and place == 0:
            tokens[at:] += 1
        return Text(tokens, text.logprobs)

    plain, bijax = side(disturb, name="plain JAX"), side(name="bijax")
    first, *_ = found = examples([plain, bijax], PROMPTS, decode, most=3)
    assert first.way == "batches of 8"
    assert [pair.parts_at for pair in first.pairs] == [2, None]
    assert [pair.side for pair in first.pairs] == ["plain JAX", "bijax"]
    changed, same = first.pairs
    assert changed.alone.before == changed.batch.before
    assert changed.alone.token != changed.batch.token
    texts = [pieces.before + pieces.token + pieces.after for pieces in (changed.alone, same.alone, same.batch)]
    assert len(set(texts)) == 1
    assert len({example.prompt for example in found}) == len(found)
    assert examples([bijax], PROMPTS, decode, most=3) == []


def test_a_character_of_several_tokens():
    """The text of the first tokens ends with a sign for the missing half, which the whole text does not have."""

    def halves(tokens: np.ndarray) -> str:
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")

    def disturb(way, batch_size, place, text):
        return Text(np.array([65, 0xC3, 0xA4 if way.name == "alone" else 0xB6]), np.zeros(3, np.float32))

    found = side(disturb, [Way("batch", ((0, 1),))])
    (example, *_) = examples([found], PROMPTS, halves, most=1)
    (pair,) = example.pairs
    assert (pair.alone, pair.batch) == (Pieces("A", "ä"), Pieces("A", "ö"))


def test_wrapped_texts_keep_their_parts():
    pieces = Pieces("The sea is\na ", "place", " where words of several letters are wrapped into lines")
    lines = _lines(pieces, 2.0)
    assert len(lines) > 3
    joined = " ".join(text for line in lines for _, text, _ in line)
    assert joined.split() == (pieces.before + pieces.token + pieces.after).split()
    assert [text for line in lines for _, text, kind in line if kind == "first"] == ["place"]
    assert " ".join(text for line in lines for _, text, kind in line if kind == "same") == "The sea is a"


@pytest.mark.parametrize("texts", ["the same", "moved", "parted", "empty"])
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_a_picture_is_drawn(texts, scheme, tmp_path: Path):
    def disturb(way, batch_size, place, text):
        if texts == "empty":
            return Text(text.tokens[:0], text.logprobs[:0])
        if texts == "the same" or way.name == "alone":
            return text
        tokens = text.tokens + 1 if texts == "parted" else text.tokens
        return Text(tokens, shift(text.logprobs, 1))

    path = tmp_path / "picture"
    found = demo(side(disturb), side())
    assert bool(found.examples) == (texts == "parted")
    draw_picture(path, found, scheme)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    draw_picture(tmp_path / "picture.png", demo(side(), side()))
    assert dict(mpl.rcParams) == before


def test_a_text_that_is_one_word():
    long = "x" * 300
    assert "".join(t for line in _lines(Pieces(long), 3.0) for _, t, _ in line) == long


def test_pairs_are_plain_data():
    pair = Pair("bijax", Pieces("a"), Pieces("a"), None)
    assert Example("prompt", "way", (pair,)).pairs[0].alone == Pieces("a")
