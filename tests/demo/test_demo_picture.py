"""The picture: its cells and colours, and the file."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import LogNorm, to_rgba

from bijax.demo.compare import Text
from bijax.demo.compute import SideResult, compute_side
from bijax.demo.picture import DISTANCES, PARTED, SAME, cells, colour, draw_picture
from bijax.demo.ways import Way, alone, other_ways
from tests.demo.demo_fakes import FakeModel, SilentWatcher, shift


def side(disturb=lambda way, batch_size, place, text: text, others=None, tokens=6) -> SideResult:
    others = others or other_ways(3, seed=0)
    return compute_side(
        "side", FakeModel(tokens, disturb), [[1], [2], [3]], alone(3), others, max_new_tokens=tokens,
        watcher=SilentWatcher(),
    )  # fmt: skip


def test_cells_keep_the_worst_of_every_token():
    def disturb(way, batch_size, place, text):
        if batch_size == 1:
            return text
        tokens = text.tokens.copy()
        if place == 1:
            tokens[2:] = 0
        return Text(tokens, shift(text.logprobs, [5 + place, *[0] * (len(tokens) - 1)]))

    result = side(disturb, [Way("batch", ((0, 1), (0, 2)))])
    grid = cells(result.ways[0], 3, 6).reshape(3, 6)
    lengths = [len(text.tokens) for text in result.alone]
    assert grid[0, : lengths[0]].tolist() == [5] + [0] * (lengths[0] - 1)
    assert grid[1, : lengths[1]].tolist() == [6, 0] + [np.inf] * (lengths[1] - 2)
    for prompt, length in enumerate(lengths):
        assert np.isnan(grid[prompt, length:]).all()


def test_a_difference_without_distance_is_seen():
    def disturb(way, batch_size, place, text):
        sign = 0.0 if way.name == "alone" else -0.0
        return Text(text.tokens, np.full_like(text.logprobs, sign))

    result = side(disturb, [Way("again", ((0,),))])
    assert np.nanmin(cells(result.ways[0], 3, 6)) == 1


def test_colours():
    norm = LogNorm(1, 100, clip=True)
    image = colour(np.array([[0, np.inf, np.nan, 1, 100]]), norm)
    expected = [to_rgba(SAME), to_rgba(PARTED), to_rgba("white"), DISTANCES(0.0), DISTANCES(1.0)]
    np.testing.assert_array_equal(image[0], expected)


@pytest.mark.parametrize("texts", ["the same", "moved", "parted", "empty"])
def test_a_picture_is_drawn(texts, tmp_path: Path):
    def disturb(way, batch_size, place, text):
        if texts == "empty":
            return Text(text.tokens[:0], text.logprobs[:0])
        if texts == "the same" or way.name == "alone":
            return text
        tokens = text.tokens + 1 if texts == "parted" else text.tokens
        return Text(tokens, shift(text.logprobs, 1))

    path = tmp_path / "picture"
    draw_picture(path, [side(disturb), side()], tokens_per_text=6, subtitle="a subtitle")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    draw_picture(tmp_path / "picture.png", [side(), side()], tokens_per_text=6, subtitle="")
    assert dict(mpl.rcParams) == before
