"""Figures of latent attention."""

from typing import Any, Final

from benchmarks.tables.figures import Cell, on_gpu, paragraph, table

_NAMES: Final = (
    *("queries", "heads", "latents of each", "ours", "TFLOP/s", "share of the speed of a copy"),
    *("time, in that of counted work", "against plain JAX"),
)


def cases() -> str:
    """Decoding and prompts, against a copy, counted work and plain JAX."""
    figures = on_gpu("latent_bf16")
    head = paragraph(
        f"Device times of latents of 576 columns (bfloat16; {figures.source}; `benchmarks/bench_latent_gpu.py`).",
        "Decoding is compared with the speed of a copy, a prompt with the time that its products would take at the",
        "rate of cuDNN's causal attention with as many heads of 128, both measured in the same run. The last column is",
        "the time of the same formula in plain JAX, whose scores lie in memory, divided by ours:",
    )
    rows = [_row(cell) for cell in figures.cells]
    return "\n".join([head, "", table(_NAMES, rows, "lrrrrrrr")])


def _row(cell: Cell) -> list[str]:
    pages = cell["what"].partition(", ")[2]
    queries = f"{cell['sequences']} × {cell['queries']}" + (f", {pages}" if pages else "")
    numbers = [str(cell[name]) for name in ("heads", "latents")]
    return [
        *(queries, *numbers, f"{cell['ours_us']:.0f} µs", f"{cell['rate']:.0f}"),
        *(_number(cell, name) for name in ("copy", "counted", "ratio")),
    ]


def _number(cell: Cell, name: str) -> str:
    found: Any = cell.get(name)
    return "" if found is None else f"{found:.2f}"
