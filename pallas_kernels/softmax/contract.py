"""The order in which the GPU kernels compute the statistics of a softmax in one pass over the row."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.base_contract import Contract
from pallas_kernels.rows.contract.rows import LANES

_SHORT_SEGMENT: Final = 1024


_LONG_SEGMENT: Final = 4096


_MOST_SHORT_SEGMENTS: Final = 8


@dataclass(frozen=True)
class OnlineRowContract(Contract):
    """How the maximum m of a row and the sum of exp(x - m) are computed in one pass over the row.

    The row is split into segments of `segment` columns (fewer than `lanes` leftover columns are appended to the last
    one), a segment into chunks of `chunk` blocks of `lanes` columns. Lane i processes the i-th column of every block.
    In each segment it starts with maximum -inf and sum 0. For each chunk in ascending order it first updates the
    maximum, then the sum to fma(sum, exp(old maximum - new maximum), the chunk's exponentials added in order). Segments
    are merged lane by lane: n is the maximum over all segments, and each segment in order updates the total to
    fma(segment's sum, exp(segment's maximum - n), total). A halving tree reduces the lanes' maxima to m, another adds
    their sums, each first multiplied by exp(lane's maximum - m). In the exponents, 0 replaces a non-finite maximum.

    Attributes:
        lanes: Columns of one block; a power of two.
        chunk: Blocks of one chunk.
        segment: Columns of one segment, a multiple of a chunk.
    """

    ID = "online-rows/v{version}/f32-lanes{lanes}-chunk{chunk}-segment{segment}-tree"
    lanes: int = LANES
    chunk: int = 8
    segment: int = _LONG_SEGMENT

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes must be a power of two, got {self.lanes}.")
        if self.chunk < 1 or self.segment < 1 or self.segment % (self.chunk * self.lanes):
            raise ValueError(
                f"segment must be a multiple of the {self.chunk * self.lanes} columns of a chunk, got {self.segment}."
            )


def online_row_contract(columns: int) -> OnlineRowContract:
    """Returns the contract of the softmax family's statistics for kernels that compute them in one pass.

    One warpgroup processes a segment, so several warpgroups can share a row.

    Args:
        columns: Columns of a row.

    Example:
        >>> online_row_contract(4096).segment, online_row_contract(128256).segment
        (1024, 4096)
    """
    short = columns <= _MOST_SHORT_SEGMENTS * _SHORT_SEGMENT
    return OnlineRowContract(segment=_SHORT_SEGMENT if short else _LONG_SEGMENT)
