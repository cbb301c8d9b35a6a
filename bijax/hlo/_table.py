"""Tables, as plain text and for rich."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

STYLES = {"variant": "bold red", "suspect": "yellow", "note": "dim", "ours": "green"}


@dataclasses.dataclass(frozen=True)
class Rows:
    """A table.

    Attributes:
        title: Lines above it.
        header: Name of each column.
        rows: Cells of each row; the first cell names the verdict that colours the row.
        footer: Lines below it.
        right: Which columns are numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: str
    right: tuple[int, ...] = ()

    def plain(self) -> str:
        """Returns the table as text, columns padded with spaces."""
        lines = [self.header, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = (
            "  ".join(
                cell.rjust(w) if n in self.right else cell.ljust(w)
                for n, (cell, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
        return "\n".join([self.title, *body, *([self.footer] if self.footer else [])])

    def rich(self, styles: dict[str, str] = STYLES) -> "Group":
        """Returns the table for a rich console; needs rich.

        The last column is long, so its texts stand below the table, with numbers.

        Args:
            styles: Style of a row by its first cell.
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


def percent(share: float) -> str:
    """Returns a share as text: "<0.1 %" for what is little, nothing for nothing."""
    if not share:
        return ""
    return "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
