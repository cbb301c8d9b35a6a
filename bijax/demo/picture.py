"""The picture: every token in every way of computing, plain JAX next to bijax."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bijax.demo.compute import SideResult, WayResult

SAME = "#d9ebe4"
PARTED = "#2d2142"
INK = "#222222"
FAINT = "#666666"
# Ascending in darkness, so that they stay in order in grey and for colour-blind eyes.
DISTANCES = LinearSegmentedColormap.from_list("distances", ["#fbd45c", "#f79a3e", "#e4574c", "#b32d6c", "#6d2a86"])
WIDTH, HEADER, FOOTER, ROW = 15.0, 1.5, 1.35, 0.3  # inches


def draw_picture(path: Path, sides: Sequence[SideResult], *, tokens_per_text: int, subtitle: str) -> None:
    """Draws one panel for each side and saves them as PNG.

    A row is a way of computing; a column is a token of a prompt's text. The colour is the largest distance to the
    log-probability that the token has alone, among the texts that this way generated for the prompt.

    Args:
        path: The file to write.
        sides: The results.
        tokens_per_text: Columns for each prompt.
        subtitle: A line on the model and the device.

    Raises:
        OSError: If the file cannot be written.
    """
    grids = [np.stack([cells(result, len(side.alone), tokens_per_text) for result in side.ways]) for side in sides]
    largest = max(side.total.largest_ulp for side in sides)
    norm = LogNorm(1, max(10, largest), clip=True)
    height = HEADER + FOOTER + ROW * len(grids[0])
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.13, right=0.985, bottom=FOOTER / height, top=1 - HEADER / height, wspace=0.04)
    for panel, side, grid in zip(panels, sides, grids, strict=True):
        _draw_panel(panel, side, colour(grid, norm), tokens_per_text)
    panels[0].set_yticks(range(len(grids[0])), [result.way.name for result in sides[0].ways], fontsize=10.5, color=INK)
    left = panels[0].get_position().x0
    title = "Which log-probabilities change when the same texts are computed in other ways?"
    figure.text(left, 1 - 0.34 / height, title, fontsize=17, fontweight="bold", color=INK, va="center")
    figure.text(left, 1 - 0.66 / height, subtitle, fontsize=10.5, color=FAINT, va="center")
    _draw_key(figure, norm, np.concatenate(grids), left, height)
    figure.savefig(path, format="png")


def cells(result: WayResult, num_prompts: int, tokens_per_text: int) -> np.ndarray:
    """Gives the cells of one way of computing.

    Returns:
        float64 array of shape (num_prompts * tokens_per_text,): 0 where the bits are the same in every text, the
        largest distance in ULP (at least 1) where they differ, inf where a text has parted before, nan where no text
        has a token.
    """
    largest = np.full((num_prompts, tokens_per_text), np.nan)
    for found in result.comparisons:
        distance = np.where(found.differing, np.maximum(found.ulps.astype(np.float64), 1), 0)
        line = np.concatenate([distance, np.full(found.parted, np.inf)])
        largest[found.prompt, : line.size] = np.fmax(largest[found.prompt, : line.size], line)
    return largest.reshape(-1)


def colour(grid: np.ndarray, norm: LogNorm) -> np.ndarray:
    """Colours cells.

    Args:
        grid: float64 array of shape (rows, columns), as `cells` gives them.
        norm: From distances in ULP to 0 … 1.

    Returns:
        RGBA, float64 array of shape (rows, columns, 4).
    """
    distance = np.isfinite(grid) & (grid > 0)
    image = np.asarray(DISTANCES(norm(np.where(distance, grid, 1))))
    image[grid == 0] = to_rgba(SAME)
    image[np.isposinf(grid)] = to_rgba(PARTED)
    image[np.isnan(grid)] = to_rgba("white")
    return image


def _draw_panel(panel: Axes, side: SideResult, image: np.ndarray, tokens_per_text: int) -> None:
    rows, columns = image.shape[:2]
    panel.imshow(image, aspect="auto", interpolation="nearest", extent=(0, columns, rows - 0.5, -0.5))
    for edge in range(tokens_per_text, columns, tokens_per_text):
        panel.axvline(edge, color="white", linewidth=2)
    for edge in range(1, rows):
        panel.axhline(edge - 0.5, color="white", linewidth=1)
    prompts = columns // tokens_per_text
    panel.set_xticks((np.arange(prompts) + 0.5) * tokens_per_text, [str(n + 1) for n in range(prompts)], color=INK)
    panel.set_xlabel(f"prompt (tokens 1 to {tokens_per_text} of its text)", color=FAINT)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.set_title(side.side, loc="left", fontsize=14, fontweight="bold", color=INK, pad=24)
    total = side.total
    outcome = f"{total.tokens_differing:,} of {total.tokens:,} log-probabilities differ"
    if total.texts_differing:
        outcome += f"; {total.texts_differing:,} of {total.texts:,} texts differ"
    panel.text(0, 1 + 0.07 / (ROW * rows), outcome, transform=panel.transAxes, fontsize=10.5, color=INK)


def _draw_key(figure: Figure, norm: LogNorm, grid: np.ndarray, left: float, height: float) -> None:
    bar = figure.add_axes((left, 0.42 / height, 0.33, 0.15 / height))
    figure.colorbar(ScalarMappable(norm, DISTANCES), cax=bar, orientation="horizontal")
    bar.xaxis.set_major_locator(LogLocator(10, numticks=12))
    bar.xaxis.set_minor_locator(NullLocator())
    bar.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar.tick_params(length=0, labelsize=9, labelcolor=INK)
    bar.set_title("distance in ULP (float32 numbers from one to the other)", loc="left", fontsize=9.5, color=INK)
    for spine in bar.spines.values():
        spine.set_visible(False)
    meanings = [(SAME, SAME, "the same bits", True)]
    meanings.append((PARTED, PARTED, "another text from here on", bool(np.isposinf(grid).any())))
    meanings.append(("white", FAINT, "the text has ended", bool(np.isnan(grid).any())))
    figure.legend(
        handles=[Patch(fc=face, ec=edge, lw=0.8, label=label) for face, edge, label, occurs in meanings if occurs],
        loc="center left",
        bbox_to_anchor=(left + 0.35, 0.5 / height),
        ncols=3,
        frameon=False,
        fontsize=10.5,
        labelcolor=INK,
    )
