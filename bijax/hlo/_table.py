"""Tables, as plain text or for rich."""

import dataclasses
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

STYLES = {"variant": "bold red", "suspect": "yellow", "note": "dim", "ours": "green"}
_NARROW = 10


@dataclasses.dataclass(frozen=True)
class Rows:
    """A table.

    Attributes:
        title: Lines above it.
        header: Name of each column.
        rows: Cells of each row; the first cell is the verdict, which colours the row.
        footer: Lines below it.
        right: The columns that hold numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: str
    right: tuple[int, ...] = ()

    def plain(self, width: int | None = None) -> str:
        """Returns the table as text, columns padded with spaces.

        Args:
            width: Maximum width if possible; cells are wrapped to fit. None for the width of the terminal if the
                standard output is one, and otherwise for no limit.
        """
        if width is None and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
        lines = [self.header, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        if width is not None:
            widths = _fitting(widths, width)
        body = (text for line in lines for text in self._broken(line, widths))
        return "\n".join([self.title, *body, *([self.footer] if self.footer else [])])

    def _broken(self, line: tuple[str, ...], widths: list[int]) -> Iterator[str]:
        """Yields the lines of one row with cells wrapped to the widths of the columns."""
        cells = [textwrap.wrap(cell, w) if len(cell) > w else [cell] for cell, w in zip(line, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            yield "  ".join(
                part.rjust(w) if n in self.right else part.ljust(w)
                for n, (part, w) in enumerate(zip(parts, widths, strict=True))
            ).rstrip()

    def rich(self, styles: dict[str, str] = STYLES) -> "Group":
        """Returns the table for a rich console; needs rich.

        The last column is long, so its texts are numbered and printed below the table.

        Args:
            styles: Row style by first cell.
        """
        from rich import box
        from rich.console import Group, RenderableType
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number in self.right else "left", overflow="fold")
        notes = list(dict.fromkeys(row[-1] for row in self.rows))
        for row in self.rows:
            cells = (*row[:-1], str(1 + notes.index(row[-1])))
            table.add_row(*map(Text, cells), style=styles.get(row[0], ""))
        below = [Text(f"{number} {note}", style="dim") for number, note in enumerate(notes, 1)]
        body: list[RenderableType] = [table, *below] if self.rows else []
        return Group(Text(self.title), *body, Text(self.footer, style="bold"))


def _fitting(widths: list[int], width: int) -> list[int]:
    """Returns the widths of columns, narrowing the widest until all fit, or none is wide."""
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths, default=0) > _NARROW:
        widths[widths.index(max(widths))] -= 1
    return widths


def percent(share: float) -> str:
    """Returns a share as text: "<0.1 %" for small shares, empty for zero."""
    if not share:
        return ""
    return "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
