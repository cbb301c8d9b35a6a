"""Shares of the GPU's own limits: a table and a chart of `docs/guide/gpu.md`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.tables.figures import Figures, mean, on_gpu, table
from benchmarks.tables.gpu import heads, kind, shape

TFLOPS: Final = 989.4
"""Dense bfloat16 products of an H100 SXM and an H200, in 10^12 operations a second (NVIDIA's data sheets)."""

TB_PER_S: Final = {"H100": 3.35, "H200": 4.8}
"""Bandwidth of their memory (NVIDIA's data sheets)."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Share:
    """A line of the table.

    Attributes:
        text: What is computed.
        limit: "memory" or "products".
        benchmark: Whose cells are taken.
        condition: Which of them.
        rate: TB/s or TFLOP/s of a cell.
        least: Describes the cell with the least share.
    """

    text: str
    limit: str
    benchmark: str
    condition: Callable[[Cell], bool]
    rate: Callable[[Cell], float]
    least: Callable[[Cell], str]

    @property
    def figures(self) -> Figures:
        """The cells."""
        return on_gpu(self.benchmark).where(self.condition)

    @property
    def shares(self) -> list[float]:
        """The share of each cell."""
        figures = self.figures
        most = TB_PER_S[figures.device] if self.limit == "memory" else TFLOPS
        return [self.rate(cell) / most for cell in figures.cells]


def _bytes_rate(cell: Cell) -> float:
    m, k, n = (cell[name] for name in "mkn")
    return float(2 * (m * k + k * n + m * n) / cell["ours_us"] / 1e6)


def _products_rate(cell: Cell) -> float:
    return float(2 * cell["m"] * cell["k"] * cell["n"] / cell["ours_us"] / 1e6)


def _rate(cell: Cell) -> float:
    return float(cell["rate"])


def _rows(*numbers: int, least_mb: int = 0) -> Callable[[Cell], bool]:
    return lambda c: c["m"] in numbers and 2 * c["k"] * c["n"] >= least_mb * 1_000_000


ROWS: Final = (
    Share(
        "products of 1, 8 and 64 rows, weights of 64 MB and more",
        "memory",
        "matmul_bf16",
        _rows(1, 8, 64, least_mb=64),
        _bytes_rate,
        shape,
    ),
    Share(
        "the same, weights of 8 to 64 MB",
        "memory",
        "matmul_bf16",
        lambda c: _rows(1, 8, 64, least_mb=8)(c) and not _rows(1, 8, 64, least_mb=64)(c),
        _bytes_rate,
        shape,
    ),
    Share("products of 8192 rows", "products", "matmul_bf16", _rows(8192), _products_rate, shape),
    Share("attention, decoding", "memory", "attention_bf16", kind("decode"), _rate, heads),
    Share(
        "attention, prefill, heads of 128",
        "products",
        "attention_bf16",
        lambda c: kind("causal", "full")(c) and c["size"] == 128,
        _rate,
        heads,
    ),
    Share(
        "attention, gradients, heads of 128",
        "products",
        "attention_bf16",
        lambda c: "gradients" in c["what"] and c["size"] == 128,
        _rate,
        heads,
    ),
)


def limits() -> str:
    """The table."""
    lines = []
    for row in ROWS:
        found, figures = row.shares, row.figures
        least = figures.cells[found.index(min(found))]
        of = f"{TB_PER_S[figures.device]} TB/s" if row.limit == "memory" else f"{TFLOPS:.0f} TFLOP/s"
        lines.append(
            [
                row.text,
                figures.device,
                of,
                f"{mean(found):.2f}",
                f"{max(found):.2f}",
                f"{min(found):.2f} ({row.least(least)})",
            ]
        )
    names = ["bfloat16", "GPU", "limit", "geometric mean", "best", "least"]
    return table(names, lines)
