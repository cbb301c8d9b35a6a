"""The lower half of the picture: every token in every way of computing."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bijax.demo.colours import Scheme
from bijax.demo.compute import SideResult, WayResult

# Ascending in darkness, so that they stay in order in grey and for colour-blind eyes.
DIFFERENCES = LinearSegmentedColormap.from_list("differences", ["#fbd45c", "#f79a3e", "#e4574c", "#b32d6c", "#6d2a86"])
ROW = 0.3
"""Height of a row, in inches."""


def cells(result: WayResult, num_prompts: int, tokens_per_text: int) -> np.ndarray:
    """Gives the cells of one way of computing.

    Returns:
        float64 array of shape (num_prompts * tokens_per_text,): 0 where the bits are the same in every text, the
        largest difference of the log-probability where they differ (the smallest positive number if only the sign of a
        zero does), inf where a text has diverged before, nan where no text has a token.
    """
    largest = np.full((num_prompts, tokens_per_text), np.nan)
    for found in result.comparisons:
        difference = np.where(found.differing, np.maximum(found.distances, np.finfo(np.float64).tiny), 0)
        line = np.concatenate([difference, np.full(found.parted, np.inf)])
        largest[found.prompt, : line.size] = np.fmax(largest[found.prompt, : line.size], line)
    return largest.reshape(-1)


def colour(grid: np.ndarray, norm: LogNorm, scheme: Scheme) -> np.ndarray:
    """Colours cells.

    Args:
        grid: float64 array of shape (rows, columns), as `cells` gives them.
        norm: From differences to 0 … 1.
        scheme: Colours of the page.

    Returns:
        RGBA, float64 array of shape (rows, columns, 4).
    """
    differs = np.isfinite(grid) & (grid > 0)
    image = np.asarray(DIFFERENCES(norm(np.where(differs, grid, 1.0))))
    image[grid == 0] = to_rgba(scheme.same)
    image[np.isposinf(grid)] = to_rgba(scheme.parted)
    image[np.isnan(grid)] = to_rgba(scheme.page)
    return image


def scale(sides: Sequence[SideResult]) -> LogNorm:
    """Spans whole powers of ten around the differences that occur, four at most."""
    largest = max((side.total.largest_difference for side in sides), default=0)
    top = math.ceil(math.log10(largest)) if largest > 0 else 0
    return LogNorm(10.0 ** (top - 4), 10.0**top, clip=True)


def draw_panel(
    panel: Axes, side: SideResult, norm: LogNorm, *, prompts: int, tokens_per_text: int, scheme: Scheme
) -> np.ndarray:
    """Draws one side; returns its cells."""
    grid = np.stack([cells(result, prompts, tokens_per_text) for result in side.ways])
    rows, columns = grid.shape
    image = colour(grid, norm, scheme)
    panel.imshow(image, aspect="auto", interpolation="nearest", extent=(0, columns, rows - 0.5, -0.5))
    panel.set_facecolor(scheme.page)
    for edge in range(tokens_per_text, columns, tokens_per_text):
        panel.axvline(edge, color=scheme.page, linewidth=2)
    for edge in range(1, rows):
        panel.axhline(edge - 0.5, color=scheme.page, linewidth=1)
    places = (np.arange(prompts) + 0.5) * tokens_per_text
    panel.set_xticks(places, [str(n + 1) for n in range(prompts)], color=scheme.ink)
    panel.set_xlabel(f"prompt (tokens 1 to {tokens_per_text} of its text)", color=scheme.faint)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.set_title(side.side, loc="left", fontsize=14, fontweight="bold", color=scheme.ink, pad=24)
    total = side.total
    outcome = f"{total.tokens_differing:,} of {total.tokens:,} log-probabilities differ"
    panel.text(0, 1 + 0.07 / (ROW * rows), outcome, transform=panel.transAxes, fontsize=10.5, color=scheme.ink)
    return grid


def draw_key(figure: Figure, norm: LogNorm, grid: np.ndarray, left: float, height: float, scheme: Scheme) -> None:
    """Draws what the colours mean, as far as they occur in the cells."""
    bar = figure.add_axes((left, 0.42 / height, 0.33, 0.15 / height))
    figure.colorbar(ScalarMappable(norm, DIFFERENCES), cax=bar, orientation="horizontal")
    bar.xaxis.set_major_locator(LogLocator(10, numticks=12))
    bar.xaxis.set_minor_locator(NullLocator())
    bar.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.tick_params(length=0, labelsize=9, labelcolor=scheme.ink)
    bar.set_title("largest change of a log-probability", loc="left", fontsize=9.5, color=scheme.ink)
    for spine in bar.spines.values():
        spine.set_visible(False)
    meanings = [(scheme.same, scheme.same, "the same bits", True)]
    meanings.append((scheme.parted, scheme.parted, "another text from here on", bool(np.isposinf(grid).any())))
    meanings.append((scheme.page, scheme.faint, "the text has ended", bool(np.isnan(grid).any())))
    figure.legend(
        handles=[Patch(fc=face, ec=edge, lw=0.8, label=label) for face, edge, label, occurs in meanings if occurs],
        loc="center left",
        bbox_to_anchor=(left + 0.35, 0.5 / height),
        ncols=3,
        frameon=False,
        fontsize=10.5,
        labelcolor=scheme.ink,
    )
