"""The picture: a text that changes, and every token in every way of computing, plain JAX next to bijax."""

import warnings
from pathlib import Path

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bijax.demo.colours import LIGHT, Scheme
from bijax.demo.heat_map import ROW, draw_key, draw_panel, scale
from bijax.demo.measure import Demo, precision
from bijax.demo.picture_texts import draw_texts, texts_height

WIDTH, MARGIN, HEADER, PANEL_HEADER, FOOTER = 15.0, 0.25, 1.05, 0.75, 1.35  # inches


def draw_picture(path: Path, demo: Demo, scheme: Scheme = LIGHT) -> None:
    """Draws the results and saves them as PNG.

    At the top is the first example: a prompt's text alone and in a batch. Below is a panel for each side: a row is a
    way of computing; a column is a token of a prompt's text. The colour is the largest change of the token's
    log-probability, among the texts that this way generated for the prompt.

    Args:
        path: The file to write.
        demo: The results.
        scheme: Colours of the page.

    Raises:
        OSError: If the file cannot be written.
    """
    width = WIDTH - 2 * MARGIN
    example = demo.examples[0] if demo.examples else None
    rows = len(demo.sides[0].ways)
    above = HEADER + (texts_height(example, width) if example else 0)
    height = above + PANEL_HEADER + ROW * rows + FOOTER
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor=scheme.page)
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # Characters that matplotlib's font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        _draw_header(figure, demo, height, scheme)
        if example:
            draw_texts(figure, example, left=MARGIN, top=height - HEADER, width=width, scheme=scheme)
        _draw_panels(figure, demo, above, height, scheme)
        figure.savefig(path, format="png")


def _draw_header(figure: Figure, demo: Demo, height: float, scheme: Scheme) -> None:
    plain, invariant = (side.total for side in demo.sides)
    title = (
        f"Generated in batches instead of alone, {plain.texts_differing} of {plain.texts} texts change with "
        f"{demo.sides[0].side}, {invariant.texts_differing} with {demo.sides[1].side}"
    )
    subtitle = f"{demo.model} on {demo.device}, jax {jax.__version__}, greedy (temperature 0), "
    subtitle += precision(demo.arguments)
    left = MARGIN / WIDTH
    figure.text(left, 1 - 0.34 / height, title, fontsize=17, fontweight="bold", color=scheme.ink, va="center")
    figure.text(left, 1 - 0.66 / height, subtitle, fontsize=10.5, color=scheme.faint, va="center")


def _draw_panels(figure: Figure, demo: Demo, above: float, height: float, scheme: Scheme) -> None:
    norm = scale(demo.sides)
    panels = figure.subplots(1, len(demo.sides), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(
        left=0.18,
        right=1 - MARGIN / WIDTH,
        bottom=FOOTER / height,
        top=1 - (above + PANEL_HEADER) / height,
        wspace=0.04,
    )
    grids = [
        draw_panel(
            panel,
            side,
            norm,
            prompts=len(demo.prompt_tokens),
            tokens_per_text=demo.arguments.tokens,
            scheme=scheme,
        )
        for panel, side in zip(panels, demo.sides, strict=True)
    ]
    names = [result.way.name for result in demo.sides[0].ways]
    panels[0].set_yticks(range(len(names)), names, fontsize=10.5, color=scheme.ink)
    draw_key(figure, norm, np.concatenate(grids), panels[0].get_position().x0, height, scheme)
