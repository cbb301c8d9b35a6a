"""Schedules of Triton kernels that add rows of a batch: how a chunk is partitioned. They do not affect the bits."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.contract import ROW_CHUNK

_WARP: Final = 32
_LOAD_BYTES: Final = 8  # of a thread in each of 16 rows
_MOST_WARPS: Final = 4
_ENOUGH_PROGRAMS: Final = 264  # two for each multiprocessor


@dataclass(frozen=True)
class ChunkSchedule:
    """How a chunk of rows is added.

    Attributes:
        strip: Columns of a program; a power of two.
        warps: Warps of a program.
    """

    strip: int
    warps: int


def chunk_schedule(rows: int, columns: int, itemsize: int) -> ChunkSchedule:
    """Returns the schedule for `rows` rows of `columns` columns of at most `itemsize` bytes.

    Example:
        >>> chunk_schedule(16384, 4096, 2), chunk_schedule(512, 4096, 2)
        (ChunkSchedule(strip=512, warps=4), ChunkSchedule(strip=32, warps=1))
    """
    chunks, neighbours, warps = -(-rows // ROW_CHUNK), _LOAD_BYTES // itemsize, _MOST_WARPS

    def programs() -> int:
        return chunks * -(-columns // (neighbours * warps * _WARP))

    while warps > 1 and programs() < _ENOUGH_PROGRAMS:
        warps //= 2
    while neighbours > 1 and programs() < _ENOUGH_PROGRAMS:
        neighbours //= 2
    return ChunkSchedule(neighbours * warps * _WARP, warps)
