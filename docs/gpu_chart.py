"""The charts of `guide/gpu.md`, one line for each row of the table below them."""

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter

from benchmarks.tables import gpu, shares
from benchmarks.tables.figures import mean

FASTER, SLOWER = "#3d9a6c", "#d9822b"
CHARACTERS = 62


def ratios(ink: str) -> Figure:
    """Draws the other side's time over ours."""
    rows = [(_label(row.text), row.ratios) for row in gpu.ROWS.values()]
    figure = _chart(ink, rows, "the other side's time over ours: right of 1, bijax is faster", 1.0)
    axes = figure.axes[0]
    axes.axvline(1, color=ink, linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2, 3, 5, 8]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    return figure


def limits(ink: str) -> Figure:
    """Draws shares of the GPU's limits."""
    rows = [(_label(row.text), row.shares) for row in shares.ROWS]
    figure = _chart(ink, rows, "share of the memory's bandwidth, or of the tensor cores' rate", 0.0)
    figure.axes[0].set_xlim(0, 1)
    return figure


def _chart(ink: str, rows: Sequence[tuple[str, list[float]]], label: str, least: float) -> Figure:
    """Draws a dot at the geometric mean, and a line from the least to the largest number.

    Args:
        ink: Colour of texts.
        rows: Names and numbers.
        label: Of the horizontal axis.
        least: Means below it have the colour of what is slow.
    """
    heights = [0.19 * name.count("\n") + 0.29 for name, _ in rows]
    figure = Figure(figsize=(8, sum(heights) + 0.8))
    axes = figure.add_axes((0.5, 0.55 / (sum(heights) + 0.8), 0.48, sum(heights) / (sum(heights) + 0.8)))
    place, ticks = 0.0, []
    for (_, found), height in zip(rows, heights, strict=True):
        middle = place + height / 2
        average = mean(found)
        colour = FASTER if average >= least else SLOWER
        axes.plot([min(found), max(found)], [middle, middle], color=colour, alpha=0.45, linewidth=4)
        axes.plot([average], [middle], marker="o", color=colour, markersize=6)
        axes.annotate(
            f"{average:.2f}", (average, middle), (0, 5), textcoords="offset points", ha="center", size=7, color=ink
        )
        ticks.append(middle)
        place += height
    axes.set_ylim(place, 0)
    axes.set_yticks(ticks, [name for name, _ in rows], size=7.5, color=ink)
    axes.tick_params(colors=ink, length=0)
    axes.set_xlabel(label, color=ink, size=8)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def _label(text: str) -> str:
    return "\n".join(textwrap.wrap(text.replace("`", ""), CHARACTERS))
