"""Tables, as plain text or for rich."""

import dataclasses
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

STYLES = {"variant": "bold red", "suspect": "yellow", "note": "dim", "ours": "green"}
_COLOURS = {"red": "#c62828", "yellow": "#b26a00", "green": "#2e7d32", "cyan": "#00838f", "dim": "#808080"}
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

    def html(self, styles: dict[str, str] = STYLES) -> str:
        """Returns the table as HTML for a notebook; texts of the last column are numbered and follow below.

        Args:
            styles: Row style by first cell, as for `rich`.
        """
        notes = list(dict.fromkeys(row[-1] for row in self.rows))
        head = "".join(f"<th{self._align(n)}>{escape(name)}</th>" for n, name in enumerate(self.header))
        body = []
        for row in self.rows:
            words = styles.get(row[0], "").split()
            colour = next((_COLOURS[w] for w in words if w in _COLOURS), "")
            cells = (*row[:-1], str(1 + notes.index(row[-1])))
            columns = "".join(f"<td{self._align(n)}>{escape(cell)}</td>" for n, cell in enumerate(cells))
            body.append(f"<tr{f' style="color:{colour}"' if colour else ''}>{columns}</tr>")
        below = "".join(f"<li>{escape(note)}</li>" for note in notes)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table><ol>{below}</ol>"
        footer = "<br>".join(map(escape, self.footer.splitlines()))
        return f"<div><p>{escape(self.title)}</p>{table if self.rows else ''}<p><b>{footer}</b></p></div>"

    def _align(self, column: int) -> str:
        return f' style="text-align:{"right" if column in self.right else "left"}"'

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
        notes = list(dict.fromkeys(row[-1] for row in self.rows))
        for number, name in enumerate(self.header):
            # On a narrow terminal the wide columns are wrapped, not verdicts and numbers.
            cells = (name, *(row[number] for row in self.rows)) if number < len(self.header) - 1 else (name,)
            table.add_column(
                name,
                justify="right" if number in self.right else "left",
                overflow="fold",
                no_wrap=max(map(len, cells)) <= _NARROW,
            )
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
