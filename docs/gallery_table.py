"""The table of the gallery, from the figures that `benchmarks/gallery.py` wrote."""

import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent.parent / "benchmarks" / "results" / "gallery_cpu.json"


def table() -> str:
    """Returns the table in Markdown, with the machine below."""
    result = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = [
        "| program | changed, plain JAX | changed, bijax | time | first call | filled caches | another size |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for figures in result["cells"]:
        library, _, what = figures["program"].partition(": ")
        lines.append(
            f"| **{library}** {what} | {figures['differing_plain']} of {figures['compared']}"
            f" | {figures['differing']} of {figures['compared']} | {1 / figures['ratio']:.1f}"
            f" | {_beside(figures, 'first_call')} | {_beside(figures, 'first_call_again')}"
            f" | {_beside(figures, 'another_size')} |"
        )
    note = f"{result['device']}, jax {result['jax']}, {result['date']}"
    return "\n".join([*lines, "", f"*{note}; processor time, on a machine with other work.*", ""])


def _beside(figures: dict[str, Any], what: str) -> str:
    """Returns seconds of bijax, and how often plain JAX's fit in."""
    seconds = figures[f"{what}_s"]
    return f"{seconds:.2f} s, {seconds / figures[f'{what}_plain_s']:.1f}"
