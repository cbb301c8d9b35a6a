"""The upper half of the picture: a prompt's text alone and in a batch, for each side."""

import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bijax.demo.colours import Scheme
from bijax.demo.example import Example, Pair, Pieces

FONT = "DejaVu Sans Mono"  # comes with matplotlib
SIZE = 10.5
ADVANCE = 0.602 * SIZE / 72
"""Width of a character, in inches."""
LINE, PADDING, GAP, NAMES, HEAD = 0.19, 0.12, 0.1, 1.95, 0.62  # inches


def texts_height(example: Example, width: float) -> float:
    """Returns the height in inches that `draw_texts` needs for an example in a given width."""
    return HEAD + sum(_row_height(pair, width) + GAP for pair in example.pairs)


def draw_texts(figure: Figure, example: Example, *, left: float, top: float, width: float, scheme: Scheme) -> None:
    """Draws an example; places are in inches from the lower left corner of the figure."""
    figure_width, figure_height = figure.get_size_inches()

    def write(x: float, y: float, text: str, **style: Any) -> None:
        figure.text(x / figure_width, y / figure_height, text, va="center", **style)

    box = _box_width(width)
    columns = (left + NAMES, left + NAMES + box + GAP)
    write(left, top - 0.12, f"“{example.prompt}”", fontsize=13, fontweight="bold", color=scheme.ink)
    for x, name in zip(columns, ("alone", f"in {example.way}"), strict=True):
        write(x, top - 0.44, name, fontsize=10.5, color=scheme.faint)
    y = top - HEAD
    for pair in example.pairs:
        height = _row_height(pair, width)
        write(left, y - 0.2, pair.side, fontsize=13, fontweight="bold", color=scheme.ink)
        same = pair.parts_at is None
        verdict = "the same text" if same else f"differs from token {pair.parts_at}"
        write(left, y - 0.45, verdict, fontsize=10, color=scheme.ink if same else scheme.changed)
        for x, pieces in zip(columns, (pair.alone, pair.batch), strict=True):
            corner = (x / figure_width, (y - height) / figure_height)
            figure.add_artist(
                Rectangle(corner, box / figure_width, height / figure_height, facecolor=scheme.box, edgecolor="none")
            )
            for number, line in enumerate(_lines(pieces, box)):
                for column, text, weight in line:
                    colour = scheme.ink if weight == "same" else scheme.changed
                    write(
                        x + PADDING + column * ADVANCE,
                        y - PADDING - (number + 0.5) * LINE,
                        text,
                        fontsize=SIZE,
                        family=FONT,
                        color=colour,
                        fontweight="bold" if weight == "first" else "normal",
                        parse_math=False,
                    )
                    if weight == "first":
                        start = (x + PADDING + column * ADVANCE) / figure_width
                        corner = (start, (y - PADDING - (number + 1) * LINE) / figure_height)
                        size = (len(text) * ADVANCE / figure_width, LINE / figure_height)
                        figure.add_artist(Rectangle(corner, *size, facecolor="none", edgecolor=colour, linewidth=1))
        y -= height + GAP


def _box_width(width: float) -> float:
    return (width - NAMES - GAP) / 2


def _row_height(pair: Pair, width: float) -> float:
    box = _box_width(width)
    most = max(len(_lines(pieces, box)) for pieces in (pair.alone, pair.batch))
    return max(most * LINE + 2 * PADDING, 0.6)


def _lines(pieces: Pieces, box: float) -> list[list[tuple[int, str, str]]]:
    """Wraps a text; each line is a list of (column, characters, "same", "first" or "rest")."""
    kinds = ["same"] * len(pieces.before) + ["first"] * len(pieces.token) + ["rest"] * len(pieces.after)
    # One character for one, so that each keeps its kind.
    text = "".join(c if c.isprintable() or c == "\n" else " " for c in pieces.before + pieces.token + pieces.after)
    lines, position = [], 0
    for line in _wrapped(text, int((box - 2 * PADDING) / ADVANCE)):
        position = text.index(line, position) if line else position
        runs: list[tuple[int, str, str]] = []
        for column, character in enumerate(line):
            kind = kinds[position + column]
            if runs and runs[-1][2] == kind:
                runs[-1] = (runs[-1][0], runs[-1][1] + character, kind)
            else:
                runs.append((column, character, kind))
        lines.append([(column + len(t) - len(t.lstrip()), t.strip(), kind) for column, t, kind in runs if t.strip()])
        position += len(line)
    return [line for line in lines if line]


def _wrapped(text: str, width: int) -> list[str]:
    return [line for part in text.split("\n") for line in textwrap.wrap(part, width, expand_tabs=False) or [""]]
