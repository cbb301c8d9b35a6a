"""The chart of `guide/gpu.md`: XLA's time over ours, one line for each row of the table below it."""

import textwrap

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter

from benchmarks.tables.figures import mean
from benchmarks.tables.gpu import ROWS

FASTER, SLOWER = "#3d9a6c", "#d9822b"
CHARACTERS = 62


def chart(ink: str) -> Figure:
    """Draws a dot at the geometric mean, and a line from the worst to the best shape."""
    rows = [(_label(row.text), row.ratios) for row in ROWS.values()]
    heights = [0.19 * label.count("\n") + 0.29 for label, _ in rows]
    figure = Figure(figsize=(8, sum(heights) + 0.8))
    axes = figure.add_axes((0.5, 0.55 / (sum(heights) + 0.8), 0.48, sum(heights) / (sum(heights) + 0.8)))
    place, ticks = 0.0, []
    for (_, found), height in zip(rows, heights, strict=True):
        middle = place + height / 2
        average = mean(found)
        colour = FASTER if average >= 1 else SLOWER
        axes.plot([min(found), max(found)], [middle, middle], color=colour, alpha=0.45, linewidth=4)
        axes.plot([average], [middle], marker="o", color=colour, markersize=6)
        axes.annotate(
            f"{average:.2f}", (average, middle), (0, 5), textcoords="offset points", ha="center", size=7, color=ink
        )
        ticks.append(middle)
        place += height
    axes.axvline(1, color=ink, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(place, 0)
    axes.set_yticks(ticks, [label for label, _ in rows], size=7.5, color=ink)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2, 3, 5, 8]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(colors=ink, length=0)
    axes.set_xlabel("the other side's time over ours: right of 1, bijax is faster", color=ink, size=8)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def _label(text: str) -> str:
    return "\n".join(textwrap.wrap(text.replace("`", ""), CHARACTERS))
