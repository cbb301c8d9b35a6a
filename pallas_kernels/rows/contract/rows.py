"""The order of row reductions: norms, sums, means, and the portable softmax family."""

from dataclasses import dataclass, field
from typing import Final

from pallas_kernels.base_contract import Contract

LANES: Final = 128
"""Parallel partial sums of a short row before its final tree; in a long row, the lanes of a group."""


_LONG_ROW: Final = 1_024


@dataclass(frozen=True)
class RowContract(Contract):
    """How a row is reduced.

    The row is padded to whole blocks of `lanes(columns)` columns. Lane i adds the i-th column of every block, in block
    order, in float32. Each group of 128 neighbouring lanes is then added by a halving tree (lane i plus lane i + 64,
    and so on), and the groups by another tree (group i plus group i + half their number, and so on).

    Rows shorter than 1024 columns have one group of lanes. In longer rows the number of lanes is the largest power of
    two up to the row length, so many threads, each with a vector of neighbouring columns, can share a row.

    Attributes:
        most_lanes: Columns of the longest block; a power of two.

    Example:
        >>> [RowContract().lanes(columns) for columns in (576, 1024, 5000, 128256)]
        [128, 1024, 4096, 8192]
    """

    most_lanes: int = 8_192
    version: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        if self.most_lanes < 1 or self.most_lanes & (self.most_lanes - 1):
            raise ValueError(f"most_lanes must be a power of two, got {self.most_lanes}.")

    def lanes(self, columns: int) -> int:
        """Returns the columns of one block in a row of `columns` columns."""
        long = 1 << columns.bit_length() - 1 if columns >= _LONG_ROW else LANES
        return min(self.most_lanes, long)

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"rows/v{self.version}/f32-lanes{min(LANES, self.most_lanes)}to{self.most_lanes}-tree"


def row_contract() -> RowContract:
    """Returns the contract of every reduction over a row (norms, softmax family, sum, mean)."""
    return RowContract()
