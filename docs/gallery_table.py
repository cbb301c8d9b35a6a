"""The table of the gallery, from the figures that `benchmarks/gallery.py` wrote."""

from typing import Any

from benchmarks.tables.figures import of, table

FIRST_CALLS = ("first_call", "first_call_again", "another_size")


def page() -> str:
    """Returns the tables in Markdown, with the machine."""
    figures = of("gallery", "cpu")
    rows, first = [], []
    for cell in figures.cells:
        library, _, what = cell["program"].partition(": ")
        program = f"**{library}** {what}"
        counts = [str(cell[name]) for name in ("differing_plain", "differing")]
        rows.append([program, *counts, str(cell["compared"]), f"{1 / cell['ratio']:.1f}"])
        first.append([program, *(number for name in FIRST_CALLS for number in _first(cell, name))])
    head = ["program", "results changed by plain JAX", "by bijax", "of", "time (plain JAX: 1)"]
    of_first = ["program"]
    for name in ("first call", "filled caches", "another size"):
        of_first += [f"{name}, s", f"{name}, ratio"]
    busy = ", on a machine with other work" if any(part.get("busy") for part in figures.parts) else ""
    return (
        f"{table(head, rows, 'lrrrr')}\n\n*{figures.source}; processor time{busy}.*\n\n"
        f"## First calls\n\n{table(of_first, first, 'lrrrrrr')}\n"
    )


def _first(cell: dict[str, Any], what: str) -> tuple[str, str]:
    """Returns the seconds of bijax, and their ratio to plain JAX's."""
    seconds = cell[f"{what}_s"]
    return f"{seconds:.2f}", f"{seconds / cell[f'{what}_plain_s']:.1f}"
