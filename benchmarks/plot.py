"""Draws the results of a benchmark: ratio of XLA's time to ours over the number of rows, one line or row per shape.

python -m benchmarks.plot benchmarks/results/matmul_f32_cpu.json
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from benchmarks import record

INK, GRID = "#22303c", "#d8dee4"
MOST_LINES = 8
SHAPE = (
    *("layers", "case", "params", "precision", "storage", "transpose_w", "k", "n", "columns"),
    *("batch", "keys", "heads", "key_heads", "size", "tokens"),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG: the first column of the cells is the horizontal axis, the shape a line, op and dtype a panel.

    Where lines would be too many to tell apart, or the axis has names, a table of coloured ratios takes their place.
    """
    found = record.cells(result)
    across = next(iter(found[0]))
    by_name = isinstance(found[0][across], str)
    lines = {label(row, found, across) for row in found}
    if by_name or ("op" not in found[0] and len(lines) > MOST_LINES):
        draw_table(result, across, path)
        return
    panels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        panels[f"{row['op']}, {row['dtype']}" if "op" in row else ""].append(row)
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    size = (8, 4.5) if len(panels) == 1 else (3.6 * columns, 2.6 * rows + 0.8)
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, cells) in zip(grid.flat, panels.items(), strict=False):
        draw_panel(axes, across, cells, name)
    figure.suptitle(title_of(result), color=INK, x=0.01, ha="left", fontsize=11)
    for axes in grid[-1]:
        axes.set_xlabel(across, fontsize=9)
    figure.supylabel("XLA's time / ours (above 1: ours is faster)", fontsize=10)
    named = {name: line for axes in grid.flat for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path)


def draw_panel(axes: Any, across: str, cells: list[dict[str, Any]], name: str) -> None:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in cells:
        lines[label(row, cells, across)].append((row[across], row["ratio"]))
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    for line, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, linewidth=1.6, label=line)
    ticks = sorted({row[across] for row in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(name, color=INK, loc="left", fontsize=9)
    axes.grid(color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_table(result: dict[str, Any], across: str, path: Path, *, ink: str = INK, page: str = "white") -> None:
    """Writes a PNG of the ratios: a row for each shape, green where ours is faster, red where it is slower.

    Args:
        result: The object of a file.
        across: The field of the horizontal axis.
        path: The file to write.
        ink: Colour of the text around the cells.
        page: Colour of the background.
    """
    cells = record.cells(result)
    names = list(dict.fromkeys(label(row, cells, across) for row in cells))
    ticks = sorted({row[across] for row in cells})
    figure = Figure(
        figsize=(2.6 + 0.55 * len(ticks), 1.4 + 0.28 * len(names)), dpi=160, layout="constrained", facecolor=page
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ratios = [[float("nan")] * len(ticks) for _ in names]
    for row in cells:
        ratios[names.index(label(row, cells, across))][ticks.index(row[across])] = row["ratio"]
    axes.imshow(ratios, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.5, 2.0), aspect="auto")
    for i, line in enumerate(ratios):
        for j, ratio in enumerate(line):
            if ratio == ratio:
                axes.text(j, i, f"{ratio:.2f}", ha="center", va="center", fontsize=7, color=INK)
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right"} if isinstance(ticks[0], str) else {}
    axes.set_xticks(range(len(ticks)), [str(t) for t in ticks], fontsize=8, **slanted)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel(across, color=ink)
    axes.tick_params(colors=ink)
    axes.set_facecolor(page)
    axes.spines[:].set_visible(False)
    figure.suptitle(f"{title_of(result)}: XLA's time / ours", color=ink, x=0.01, ha="left", fontsize=9)
    figure.savefig(path)


def title_of(result: dict[str, Any]) -> str:
    """Returns the benchmark, the devices and the versions of JAX."""
    devices = " and ".join(dict.fromkeys(one["device"] for one in result["parts"]))
    versions = " and ".join(sorted({one["versions"]["jax"] for one in result["parts"]}))
    return f"{result['benchmark']} on {devices}, jax {versions}"


def label(row: dict[str, Any], cells: list[dict[str, Any]], across: str) -> str:
    """Returns the name of a cell's line: what differs among the cells besides the horizontal axis.

    Where that has names, what differs among the cells of one name.
    """
    by_name = isinstance(row[across], str)
    alike = [[other for other in cells if other[across] == name] for name in {c[across] for c in cells}]
    shape = [c for c in SHAPE if c != across]
    shape = [c for c in shape if any(len({o.get(c) for o in group}) > 1 for group in (alike if by_name else [cells]))]
    return ", ".join(str(row[c]) if isinstance(row[c], str) else f"{c}={row[c]}" for c in shape if c in row) or "bijax"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args().results:
        draw(record.read(path), path.with_suffix(".png"))
        print(f"drawn to {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
