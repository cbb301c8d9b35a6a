"""Draws the results of a benchmark: ratio of XLA's time to ours over the number of rows, one line per shape.

python benchmarks/plot.py benchmarks/results/matmul_f32_cpu.json
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GRID = "#22303c", "#d8dee4"


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG; the first column of the cells is the horizontal axis, the weights' shape names a line."""
    across = next(iter(result["cells"][0]))
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    shape = [c for c in ("k", "n", "transpose_w") if len({row.get(c) for row in result["cells"]}) > 1]
    for row in result["cells"]:
        label = ", ".join(f"{c}={row[c]}" for c in shape) or "bijax"
        lines[label].append((row[across], row["ratio"]))
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, linewidth=1.6, label=label)
    ticks = sorted({row[across] for row in result["cells"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel("XLA's time / ours (above 1: ours is faster)")
    axes.set_title(
        f"{result['benchmark']} on {result['device']}, jax {result['jax']}", color=INK, loc="left", fontsize=11
    )
    axes.grid(color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args().results:
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        print(f"drawn to {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
