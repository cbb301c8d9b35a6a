"""Texts side by side on the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from bijax.demo.example import Example, Pieces

MARK = "▶"
"""Stands before the first token that differs, since a log has no colours."""


def print_examples(console: Console, examples: Sequence[Example]) -> None:
    """Prints each example as a table: a row for each side, the text alone on the left and in a batch on the right."""
    for example in examples:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, show_lines=True, expand=True)
        table.add_column("")
        table.add_column("alone", ratio=1)
        table.add_column(f"in {example.way}", ratio=1)
        for pair in example.pairs:
            verdict = (
                ("\nsame text", "green") if pair.parts_at is None else (f"\ndiffers from\ntoken {pair.parts_at}", "red")
            )
            name = Line.assemble((pair.side, "bold"), verdict)
            table.add_row(name, _line(pair.alone), _line(pair.batch))
        console.print()
        console.print(Line.assemble(("prompt: ", "dim"), (example.prompt, "bold")))
        console.print(table)


def _line(pieces: Pieces) -> Line:
    if not pieces.token and not pieces.after:
        return Line(pieces.before)
    # White space that begins a token stays in front of the mark.
    word = pieces.token.lstrip()
    space = pieces.token[: len(pieces.token) - len(word)]
    return Line.assemble(pieces.before, space, (f"{MARK}{word}", "bold reverse red"), (pieces.after, "red"))
