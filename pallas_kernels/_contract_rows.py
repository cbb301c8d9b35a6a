"""Contracts of sums over rows and within them: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Final

LANES: Final = 128
"""Columns that the reduction of a short row adds side by side before its final tree; a group of lanes in a long one."""

ROW_CHUNK: Final = 128
"""Rows in one chunk of a sum over the batch (weight gradients)."""

_SHORT_SEGMENT: Final = 1024
_LONG_SEGMENT: Final = 4096
_MOST_SHORT_SEGMENTS: Final = 8
_LONG_ROW: Final = 1_024


@dataclass(frozen=True)
class RowContract:
    """How a row is reduced.

    The row is padded to whole blocks of `lanes(columns)` columns. Lane i adds the i-th column of every block, blocks
    upwards, in float32. Each group of 128 neighbouring lanes is then added by a halving tree (lane i plus lane i + 64,
    and so on), and the groups by another one (group i plus group i + half their number, and so on).

    Rows shorter than 1024 columns have one group of lanes. Longer ones have as many lanes as the largest power of two
    that is not longer than the row, so that many threads, each with a vector of neighbouring columns, may share a row.

    Attributes:
        most_lanes: Columns of the longest block; a power of two.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> [RowContract().lanes(columns) for columns in (576, 1024, 5000, 128256)]
        [128, 1024, 4096, 8192]
    """

    most_lanes: int = 8_192
    version: int = 2

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


@dataclass(frozen=True)
class OnlineRowContract:
    """How the maximum m of a row and the sum of exp(x - m) are taken in one pass over the row.

    The row is cut into segments of `segment` columns (the last one takes fewer than `lanes` that are left over with
    it), a segment into chunks of `chunk` blocks of `lanes` columns. Lane i sees the i-th column of every block. In a
    segment it starts with maximum -inf and sum 0, and each chunk upwards raises the maximum to that of the chunk's
    columns first, then makes the sum fma(sum, exp(old maximum - new maximum), the chunk's exponentials added upwards).
    Of several segments, lane by lane, the maximum n is taken, then, upwards, fma(segment's sum, exp(segment's maximum
    - n), total). A halving tree takes the maximum m of the lanes, another one adds their sums, each multiplied by
    exp(lane's maximum - m) first. Where a maximum is not finite, 0 stands for it in the exponents.

    Attributes:
        lanes: Columns of one block; a power of two.
        chunk: Blocks of one chunk.
        segment: Columns of one segment, whole chunks.
        version: Raised when the bits of an existing contract change on purpose.
    """

    lanes: int = LANES
    chunk: int = 8
    segment: int = _LONG_SEGMENT
    version: int = 1

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes must be a power of two, got {self.lanes}.")
        if self.chunk < 1 or self.segment < 1 or self.segment % (self.chunk * self.lanes):
            raise ValueError(
                f"segment must be a multiple of the {self.chunk * self.lanes} columns of a chunk, got {self.segment}."
            )

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"online-rows/v{self.version}/f32-lanes{self.lanes}-chunk{self.chunk}-segment{self.segment}-tree"


@dataclass(frozen=True)
class ChunkContract:
    """How a sum over the rows of a batch (a weight gradient) is taken.

    Rows are cut into chunks of `rows` at 0, rows, 2*rows, ...; each chunk is summed by a program of that one shape,
    missing rows of the last chunk counting as zeros, and the chunk sums are added upwards in float32.

    Attributes:
        rows: Rows of one chunk.
        version: Raised when the bits of an existing contract change on purpose.
    """

    rows: int = ROW_CHUNK
    version: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"chunks/v{self.version}/f32-rows{self.rows}-fold"


def row_contract() -> RowContract:
    """Returns the contract of every reduction over a row (norms, softmax family, sum, mean)."""
    return RowContract()


def online_row_contract(columns: int) -> OnlineRowContract:
    """Returns the contract of the softmax family's statistics where a kernel takes them in one pass.

    A segment is what one warpgroup takes, so that several of them can share a row.

    Args:
        columns: Columns of a row.

    Example:
        >>> online_row_contract(4096).segment, online_row_contract(128256).segment
        (1024, 4096)
    """
    short = columns <= _MOST_SHORT_SEGMENTS * _SHORT_SEGMENT
    return OnlineRowContract(segment=_SHORT_SEGMENT if short else _LONG_SEGMENT)


def chunk_contract() -> ChunkContract:
    """Returns the contract of every sum over the rows of a batch (weight gradients)."""
    return ChunkContract()
