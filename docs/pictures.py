"""The pictures of the guides, drawn with matplotlib: `draw(folder)` writes each for a light and a dark page."""

from collections.abc import Callable
from pathlib import Path

import gpu_chart
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from benchmarks import plot, record

BLUE, ORANGE, GREEN, GREY = "#4c8dd6", "#d9822b", "#3d9a6c", "#8a8f98"
PAGE = {"light": "#ffffff", "dark": "#131416"}
INK = {"light": "#202428", "dark": "#e4e6ea"}


def draw(folder: Path) -> None:
    """Writes every picture into a folder, as `NAME-light.svg` and `NAME-dark.svg`."""
    drawings: dict[str, Callable[[str], Figure]] = {
        "orders": _orders,
        "contract": _contract,
        "tree": _tree,
        "chunks": _chunks,
        "overlap": _overlap,
        "gpu": gpu_chart.ratios,
        "gpu-shares": gpu_chart.limits,
    }
    style = {"svg.hashsalt": "bijax", "font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "path"}
    with matplotlib.rc_context(style):
        for name, make in drawings.items():
            for scheme, ink in INK.items():
                figure = make(ink)
                figure.savefig(folder / f"{name}-{scheme}.svg", transparent=True, metadata={"Date": None})
                plt.close(figure)
    matmul = record.read(record.RESULTS / "matmul_bf16_h200.json")
    for scheme, ink in INK.items():
        plot.draw_table(matmul, "m", folder / f"matmul-{scheme}.png", ink=ink, page=PAGE[scheme])


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set(xlim=(0, width * 10), ylim=(0, height * 10), aspect="equal")
    axes.axis("off")
    return figure, axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str, ink: str) -> None:
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=1", fc=f"{colour}40", ec=colour)
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, linespacing=1.4)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=colour, shrinkA=1, shrinkB=1))


def _orders(ink: str) -> Figure:
    """How one sum over K is cut: by XLA for one row, for eight rows, and by bijax for both."""
    figure, axes = _canvas(8, 3.3)
    lines = [
        (25, "XLA, 1 row", "four pieces at once,\nadded as a tree", [(0, 4), (4, 8), (8, 12), (12, 16)], ORANGE),
        (15, "XLA, 8 rows", "one piece, in order", [(0, 16)], BLUE),
        (5, "bijax, any rows", "blocks of fixed length,\nadded in order", [(0, 8), (8, 16)], GREEN),
    ]
    left, step, height = 17.0, 2.2, 3.6
    axes.text(left + 8 * step, 31.2, "the 16 products of one element of the result, along K", ha="center", color=ink)
    for y, name, what, pieces, colour in lines:
        axes.text(0, y + height / 2, name, va="center", color=ink, weight="bold")
        for k in range(16):
            axes.add_patch(
                plt.Rectangle((left + k * step, y), step - 0.35, height, fc=f"{colour}30", ec=colour, lw=0.8)
            )
        for start, end in pieces:
            _arrow(axes, (left + start * step, y - 1.2), (left + end * step - 0.5, y - 1.2), colour)
        axes.text(left + 16 * step + 2, y + height / 2, what, va="center", color=ink, linespacing=1.4)
    return figure


def _contract(ink: str) -> Figure:
    """What chooses the contract and what the schedule, and what each fixes."""
    figure, axes = _canvas(8, 3)
    _box(axes, 0, 16, 24, 11, GREEN, "operation, weights (K, N),\ndtype, architecture", ink)
    _box(axes, 0, 2, 24, 8, GREY, "rows, batch, sequences", ink)
    _box(axes, 34, 16, 20, 11, GREEN, "contract\norder, blocks,\naccumulator", ink)
    _box(axes, 34, 2, 20, 11, BLUE, "schedule\ntiles, threads,\npipelines", ink)
    _box(axes, 64, 16, 16, 11, GREEN, "the bits", ink)
    _box(axes, 64, 2, 16, 11, BLUE, "the speed", ink)
    _arrow(axes, (24, 21.5), (34, 21.5), GREEN)
    _arrow(axes, (24, 17.5), (34, 10), GREEN)
    _arrow(axes, (24, 6), (34, 6.5), GREY)
    _arrow(axes, (54, 21.5), (64, 21.5), GREEN)
    _arrow(axes, (54, 7.5), (64, 7.5), BLUE)
    return figure


def _tree(ink: str) -> Figure:
    """A sum as a tree of eight leaves, on one, two and eight devices."""
    figure, axes = _canvas(8, 3.5)
    left, step, width = 20.0, 7.2, 5.6
    colours = [BLUE] * 4 + [ORANGE] * 4
    axes.text(0, 7.5, "eight leaves of K,\none chain each", va="center", color=ink, linespacing=1.4)
    centres = [left + i * step + width / 2 for i in range(8)]
    for i, centre in enumerate(centres):
        _box(axes, centre - width / 2, 5, width, 5, colours[i], str(i), ink)
    height, rows = 10.0, list(zip(centres, colours, strict=True))
    for size in (4, 2, 1):
        above = []
        for i in range(size):
            (a, colour), (b, other) = rows[2 * i], rows[2 * i + 1]
            top = (a + b) / 2
            colour = colour if colour == other else GREEN
            for start in (a, b):
                _arrow(axes, (start, height), (top, height + 4.6), colour)
            axes.text(top, height + 6, "+", ha="center", va="center", color=ink, weight="bold")
            above.append((top, colour))
        height, rows = height + 7.4, above
    axes.text(rows[0][0] + 3, height - 1.4, "float32, rounded once", va="center", color=ink)
    axes.text(0, 28, "between devices", va="center", color=GREEN, weight="bold")
    axes.text(0, 19, "on one device", va="center", color=ink, weight="bold")
    for first, colour, text in ((0, BLUE, "device 0 of 2"), (4, ORANGE, "device 1 of 2")):
        start, end = left + first * step, left + (first + 3) * step + width
        axes.plot([start, end], [3, 3], color=colour, lw=2)
        axes.text((start + end) / 2, 1, text, ha="center", va="center", color=ink)
    return figure


def _chunks(ink: str) -> Figure:
    """What the gated delta rule keeps of a sequence: the state at an edge, and the rows of the chunk after it."""
    figure, axes = _canvas(8, 2.9)
    for i, (x, width, text, colour) in enumerate(
        (
            (0, 22, "chunk 0\n64 tokens", GREY),
            (24, 22, "chunk 1\n64 tokens", GREY),
            (48, 22, "chunk 2\n17 tokens so far", GREEN),
        )
    ):
        _box(axes, x, 14, width, 8, colour, text, ink)
        axes.text(x, 23.5, str(64 * i), ha="center", color=ink)
        axes.plot([x, x], [12.5, 23], color=ink, lw=0.8)
    _box(axes, 24, 1, 22, 9, BLUE, "state at 128\nfloat32", ink)
    _box(axes, 48, 1, 22, 9, GREEN, "rows 0 to 16 of\nk, r, T, G", ink)
    _arrow(axes, (35, 14), (35, 10), BLUE)
    _arrow(axes, (59, 14), (59, 10), GREEN)
    axes.text(0, 5.5, "kept of the\nsequence:", va="center", color=ink, weight="bold", linespacing=1.4)
    axes.text(48, 26.5, "positions, edges at multiples of 64", ha="center", color=ink)
    axes.text(72, 18, "token 145 reads\nboth, and adds\nrow 17", va="center", color=ink, linespacing=1.4)
    return figure


def _overlap(ink: str) -> Figure:
    """Three stages of two halves of a batch in turns, and what travels meanwhile."""
    figure, axes = _canvas(8, 2.7)
    width, left = 10.9, 14.0
    stages = ("attention,\nrouting", "experts", "shared\nexperts,\nsums")
    turns = [(BLUE, "A", 0), (ORANGE, "B", 0), (BLUE, "A", 1), (ORANGE, "B", 1), (BLUE, "A", 2), (ORANGE, "B", 2)]
    axes.text(0, 18, "computing", va="center", color=ink, weight="bold")
    axes.text(0, 6, "travelling", va="center", color=ink, weight="bold")
    for turn, (colour, half, stage) in enumerate(turns):
        _box(axes, left + turn * width, 13, width - 0.8, 10, colour, f"{half}{stage}\n{stages[stage]}", ink)
    sent = [(0, "A to experts", BLUE), (1, "B to experts", ORANGE), (2, "A back", BLUE), (3, "B back", ORANGE)]
    for turn, text, colour in sent:
        start = left + (turn + 1) * width
        _box(axes, start, 3, width - 0.8, 6, colour, text, ink)
        _arrow(axes, (start - 1.2, 13), (start + 0.8, 9.2), colour)
        _arrow(axes, (start + width - 1.6, 9.2), (start + width + 0.4, 13), colour)
    axes.text(left + 3 * width, 25.3, "one layer of a prompt: halves A and B take turns", ha="center", color=ink)
    return figure
