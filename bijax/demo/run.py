"""The demo from its arguments to its exit code."""

import json
import os
from pathlib import Path

from rich.console import Console

from bijax.demo.arguments import Arguments
from bijax.demo.errors import DemoError
from bijax.demo.figures_json import as_json
from bijax.demo.measure import Demo, measure
from bijax.demo.picture import draw_picture
from bijax.demo.quality import quality_lines
from bijax.demo.report import closing_lines, print_table
from bijax.demo.texts import print_examples

LOG_WIDTH = 100


def run_demo(arguments: Arguments) -> int:
    """Runs the demo and prints its findings.

    Returns:
        0 if bijax showed no difference, 1 if it showed one.

    Raises:
        DemoError: If the comparison cannot be made.
    """
    _check_writable("--picture", arguments.picture)
    if arguments.json is not None:
        _check_writable("--json", arguments.json)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, LOG_WIDTH))
    demo = measure(console, arguments)
    print_demo(console, demo)
    lines = []
    if arguments.json is not None:
        _write_json(arguments.json, as_json(demo))
        lines.append(f"Figures: {arguments.json}")
    try:
        draw_picture(arguments.picture, demo)
    except OSError as error:
        raise DemoError(f"cannot save the picture: {error}") from error
    lines.append(f"Picture: {arguments.picture}")
    for line in (*lines, *closing_lines(demo.sides)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if demo.sides[-1].total.identical else 1


def print_demo(console: Console, demo: Demo) -> None:
    """Prints the texts that change, the table, and what quantisation costs."""
    print_examples(console, demo.examples)
    print_table(console, demo.sides)
    if demo.quality is not None:
        for line in quality_lines(demo.quality, demo.decode, dtype=demo.arguments.dtype):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _check_writable(option: str, path: Path) -> None:
    # Before the work, which takes minutes.
    if path.is_dir() or not path.parent.is_dir():
        raise DemoError(f"{option} must be a file in an existing folder, got {str(path)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DemoError(f"{option}: no permission to write {str(path)!r}; choose another place")


def _write_json(path: Path, figures: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DemoError(f"cannot write the figures: {error}") from error
