"""The table and the lines at the end."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from bijax.demo.compare import Figures
from bijax.demo.compute import SideResult


def print_table(console: Console, sides: Sequence[SideResult]) -> None:
    """Prints, for each side, one row for each way of computing."""
    # Narrow enough for 80 columns.
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    table.add_column("\n\ncompared with each prompt alone", no_wrap=True, min_width=33)
    for header, width in (
        ("\ntexts\nthat change", 12),
        ("\nlog-probabilities\nthat change", 18),
        ("largest change\nof a log-\nprobability", 15),
    ):
        table.add_column(header, justify="right", min_width=width)
    for side in sides:
        table.add_row(Line(side.side, style="bold"))
        for result in side.ways:
            table.add_row(f"  {result.way.name}", *_cells(result.figures))
        table.add_row("  all together", *_cells(side.total), style="bold", end_section=True)
    console.print()
    console.print(table)
    console.print()


def _cells(found: Figures) -> tuple[Line, Line, Line]:
    return (
        Line(f"{found.texts_differing} of {found.texts}", style="red" if found.texts_differing else "green"),
        Line(
            f"{found.tokens_differing} of {found.tokens}",
            style="red" if found.tokens_differing else "green",
        ),
        Line(number(found.largest_difference), style="red" if found.largest_difference else "green"),
    )


def number(difference: float) -> str:
    """Shows a difference of log-probabilities with two digits.

    Example:
        >>> number(0), number(0.11639), number(0.000012)
        ('0', '0.12', '1.2e-05')
    """
    return f"{difference:.2g}"


def closing_lines(sides: Sequence[SideResult]) -> Iterator[str]:
    """Returns a line for each side: how many texts and log-probabilities change.

    A log-probability is compared while the texts are the same: after that a token has another context.
    """
    for side in sides:
        found = side.total
        texts = f"{found.texts_differing} of {found.texts} texts change"
        if found.identical:
            texts = f"all {found.texts} texts stay the same"
        yield f"{side.side}: {texts}; {found.tokens_differing} of {found.tokens} log-probabilities differ in any bit."
