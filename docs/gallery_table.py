"""The table of the gallery, from the figures that `benchmarks/gallery.py` wrote."""

import json
from pathlib import Path

FIGURES = Path(__file__).parent.parent / "benchmarks" / "results" / "gallery_cpu.json"


def table() -> str:
    """Returns the table in Markdown, with the machine below."""
    result = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = [
        "| program | changed, plain JAX | changed, bijax | time | first call | another size |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for figures in result["cells"]:
        library, _, what = figures["program"].partition(": ")
        lines.append(
            f"| **{library}** {what} | {figures['differing_plain']} of {figures['compared']}"
            f" | {figures['differing']} of {figures['compared']} | {1 / figures['ratio']:.1f}"
            f" | {figures['first_call_s'] / figures['first_call_plain_s']:.1f}"
            f" | {figures['another_size_s'] / figures['another_size_plain_s']:.1f} |"
        )
    note = f"{result['device']}, jax {result['jax']}, {result['date']}"
    return "\n".join([*lines, "", f"*{note}; a machine with other work, so times are rough.*", ""])
