"""Schedules of the launch that computes both gradients of a norm on a Hopper GPU. They do not affect the bits."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from pallas_kernels.schedule.hopper.batch_sum import ChunkSchedule
from pallas_kernels.schedule.hopper.rows import GROUP, RowSchedule

_ROWS: Final = 512
_COLUMNS: Final = (4096, 8192)  # others were not measured
_HELD: Final = 32  # registers per thread for its columns
_NEIGHBOURS: Final = 2  # neighbouring columns of a thread that adds the gradient of the weight


class GradientsSchedule(NamedTuple):
    """How both gradients of a norm are computed.

    Attributes:
        rows: How rows are fed to the gradient of the rows.
        strips: How a chunk of rows is summed for the gradient of the weight.
        each: Rows that a block or cluster has, one after the other.
    """

    rows: RowSchedule
    strips: ChunkSchedule
    each: int = 1


def gradients_schedule(rows: int, columns: int, itemsizes: Sequence[int]) -> GradientsSchedule | None:
    """Returns the schedule of a launch for both gradients of a norm; None where two launches are faster.

    A launch for both reads the rows from memory once, if those of a chunk stay in the cache until they are added.

    Args:
        rows: Number of rows.
        columns: Columns of a row.
        itemsizes: Bytes of an element of each array that is read row by row.

    Example:
        >>> gradients_schedule(4096, 8192, (2, 2)).rows.team, gradients_schedule(4096, 8192, (4, 4)).rows.team
        (2, 4)
        >>> gradients_schedule(64, 8192, (2, 2))
    """
    if rows < _ROWS or columns not in _COLUMNS:
        return None
    registers = columns * sum(itemsizes) / (4 * GROUP)
    for team in (2, 4):
        if registers / team <= _HELD:
            return GradientsSchedule(RowSchedule(team, rows, hold=True), ChunkSchedule(_NEIGHBOURS, team))
    return None
