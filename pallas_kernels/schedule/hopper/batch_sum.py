"""Schedules of sums over rows on a Hopper GPU: how a chunk is partitioned. They do not affect the bits."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.contract import LANES, ROW_CHUNK

PARTS: Final = 8
"""Partial sums of 16 rows in a chunk."""

FEW_ROWS: Final = 16
"""Maximum number of rows that one warpgroup adds without a loop; for more, such a program would compile slowly."""

_ENOUGH_BLOCKS: Final = 250  # of two warpgroups, almost two for every multiprocessor
_LOAD_BYTES: Final = 8  # per thread and row: more rows in flight, or more neighbours of each


@dataclass(frozen=True)
class ChunkSchedule:
    """How a chunk of rows is summed.

    Attributes:
        neighbours: Neighbouring columns that a thread owns: 1, 2 or 4.
        warpgroups: Warpgroups of a block, which divide the parts: 1, 2, 4 or 8.
        apart: Write the sums of the parts, which another kernel adds: each warpgroup has a strip of one part.
    """

    neighbours: int
    warpgroups: int
    apart: bool = False


def chunk_schedule(rows: int, columns: int, itemsize: int) -> ChunkSchedule:
    """Returns the schedule for `rows` rows of `columns` columns of at most `itemsize` bytes.

    Example:
        >>> chunk_schedule(16384, 4096, 2)
        ChunkSchedule(neighbours=4, warpgroups=2, apart=False)
        >>> chunk_schedule(512, 4096, 2).warpgroups
        4
    """
    chunks = -(-rows // ROW_CHUNK)

    def blocks(neighbours: int) -> int:
        return chunks * -(-columns // (neighbours * LANES))

    def fits(neighbours: int) -> bool:
        return columns % neighbours == 0 and neighbours * LANES <= columns

    neighbours = _LOAD_BYTES // itemsize if itemsize < _LOAD_BYTES else 1
    # Narrower strips if there are too few blocks to fill the GPU.
    while neighbours > 1 and not (fits(neighbours) and (neighbours == 2 or blocks(neighbours) >= _ENOUGH_BLOCKS)):
        neighbours //= 2
    if rows <= FEW_ROWS:
        return ChunkSchedule(neighbours, 1)
    if blocks(neighbours) >= _ENOUGH_BLOCKS:
        return ChunkSchedule(neighbours, 2)
    return ChunkSchedule(neighbours, PARTS // neighbours)
