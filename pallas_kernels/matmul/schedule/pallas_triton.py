"""Schedules of the Triton matmul: tiles by the number of rows.

A schedule does not affect the bits (see `pallas_kernels.matmul.pallas_triton`), so it may depend on the number of rows.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class TritonTile:
    """The tile of one thread block.

    Attributes:
        rows: Rows of the result.
        columns: Columns of the result.
        depth: Elements of K read at once.
        warps: Warps of a block.
        stages: Operand tiles prefetched.
    """

    rows: int
    columns: int
    depth: int = 16
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "depth"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two and at least 16, got {size}.")


FEW_ROWS: Final = TritonTile(16, 64)
MANY_ROWS: Final = TritonTile(64, 64)


def triton_tile(m: int) -> TritonTile:
    """Returns the tile for `m` rows.

    Example:
        >>> triton_tile(1).rows, triton_tile(100).rows
        (16, 64)
    """
    return FEW_ROWS if m <= FEW_ROWS.rows else MANY_ROWS
