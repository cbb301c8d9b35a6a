"""What the tables are made of: the cells of one benchmark that fulfil a condition, and what is said of them."""

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import record

GPUS: Final = ("h100", "h200")
_WHOLE: Final = 0.9
Cell = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """Cells, with the parts that they come from.

    Attributes:
        cells: The cells.
        parts: The part of each cell.
    """

    cells: list[Cell]
    parts: list[dict[str, Any]]

    def where(self, condition: Callable[[Cell], bool]) -> "Figures":
        """Returns those that fulfil a condition."""
        kept = [(c, p) for c, p in zip(self.cells, self.parts, strict=True) if condition(c)]
        return Figures([c for c, _ in kept], [p for _, p in kept])

    def one(self, **values: Any) -> Cell:
        """Returns the one cell with these values."""
        [cell] = self.where(lambda c: all(c.get(name) == value for name, value in values.items())).cells
        return cell

    def column(self, name: str) -> list[Any]:
        """Returns a field of all cells."""
        return [cell[name] for cell in self.cells]

    @property
    def device(self) -> str:
        """The names of the devices."""
        return " and ".join(dict.fromkeys(_short(part["device"]) for part in self.parts))

    @property
    def jax(self) -> str:
        """The versions of JAX."""
        return " and ".join(sorted({part["versions"]["jax"] for part in self.parts}))

    @property
    def dates(self) -> str:
        """The first and the last date."""
        found = sorted({part["date"] for part in self.parts})
        if len(found) == 1:
            return str(found[0])
        first, last = found[0], found[-1]
        return f"{first} to {last[8:] if first[:7] == last[:7] else last}"

    @property
    def commits(self) -> str:
        """The commits, or how many they are."""
        found = list(dict.fromkeys(part["commit"] + ("" if part["clean"] else ", not clean") for part in self.parts))
        return ", ".join(found) if len(found) < 3 else f"{len(found)} commits"

    @property
    def source(self) -> str:
        """Device, version of JAX and dates."""
        return f"{self.device}, jax {self.jax}, {self.dates}"


def _short(device: str) -> str:
    """Returns "H100" for "NVIDIA H100 80GB HBM3"; the name of a processor is left as it is."""
    return device.removeprefix("NVIDIA ").split()[0] if device.startswith("NVIDIA ") else device


def of(benchmark: str, machine: str) -> Figures:
    """Returns all figures of a file."""
    parts = record.read(record.RESULTS / f"{benchmark}_{machine}.json")["parts"]
    pairs = [(cell, part) for part in parts for cell in part["cells"]]
    return Figures([c for c, _ in pairs], [p for _, p in pairs])


def on_gpu(benchmark: str) -> Figures:
    """Returns the figures of the GPU on which a benchmark was run last, of those with (nearly) all cells."""
    found = [of(benchmark, name) for name in GPUS if (record.RESULTS / f"{benchmark}_{name}.json").exists()]
    most = max(len(figures.cells) for figures in found)
    whole = [figures for figures in found if len(figures.cells) >= _WHOLE * most]
    return max(whole, key=lambda figures: min(part["date"] for part in figures.parts))


def ratios(figures: Figures, above: str = "xla_us", below: str = "ours_us") -> list[float]:
    """Returns the quotients of two times; `ratio` of the cells by default."""
    if (above, below) == ("xla_us", "ours_us"):
        return figures.column("ratio")
    return [cell[above] / cell[below] for cell in figures.cells]


def count(number: int, name: str) -> str:
    """Returns "1 row" or "2 rows"."""
    return f"{number} {name}{'' if number == 1 else 's'}"


def mean(values: Iterable[float]) -> float:
    """Returns the geometric mean."""
    return statistics.geometric_mean(values)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Returns a table in Markdown.

    Args:
        head: Names of the columns.
        rows: The rows.
        align: A letter for each column, `l` or `r`; left by default.
    """
    marks = ["--:" if a == "r" else "---" for a in align.ljust(len(head), "l")]
    lines = [head, *rows]
    texts = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]
    return "\n".join([texts[0], f"|{'|'.join(marks)}|", *texts[1:]])


def paragraph(*sentences: str, indent: str = "") -> str:
    """Returns sentences as lines of 120 characters at most; `indent` is put before the first one, as "- "."""
    lines = textwrap.wrap(" ".join(sentences), 120 - len(indent), break_long_words=False, break_on_hyphens=False)
    return "\n".join((indent if i == 0 else " " * len(indent)) + line for i, line in enumerate(lines))


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Returns the least and the largest value, "1.06 to 1.35", or the one that all are."""
    texts = list(dict.fromkeys(f"{value:{form}}" for value in sorted(values)))
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
