"""The table of the gallery, from the figures that `benchmarks/gallery.py` wrote."""

from typing import Any

from benchmarks.tables.figures import of, table


def page() -> str:
    """Returns the table in Markdown, followed by the machines."""
    figures = of("gallery", "cpu")
    rows = []
    for cell in figures.cells:
        library, _, what = cell["program"].partition(": ")
        counts = [f"{cell[name]} of {cell['compared']}" for name in ("differing_plain", "differing")]
        times = [_first(cell, name) for name in ("first_call", "first_call_again", "another_size")]
        rows.append([f"**{library}** {what}", *counts, f"{1 / cell['ratio']:.1f}", *times])
    head = ["program", "changed, plain JAX", "changed, bijax", "time", "first call", "filled caches", "another size"]
    busy = ", on a machine with other work" if any(part.get("busy") for part in figures.parts) else ""
    return f"{table(head, rows, 'lrrrrrr')}\n\n*{figures.source}; processor time{busy}.*\n"


def _first(cell: dict[str, Any], what: str) -> str:
    """Returns the seconds of bijax, and their ratio to plain JAX's."""
    seconds = cell[f"{what}_s"]
    return f"{seconds:.2f} s ({seconds / cell[f'{what}_plain_s']:.1f} ×)"
