"""Schedules of the launch that computes both gradients of a norm on a Hopper GPU. They do not affect the bits."""

from typing import Final, NamedTuple

from pallas_kernels.schedule.hopper.batch_sum import ChunkSchedule
from pallas_kernels.schedule.hopper.rows import RowSchedule

_ROWS: Final = 512
_AHEAD: Final = 33  # rows of 32000 columns; 66 and 132 are as fast
_MANY_ROWS: Final = 2048  # between the measured 512 and 4096


class GradientsSchedule(NamedTuple):
    """How both gradients of a norm are computed.

    Attributes:
        rows: How rows are fed to the gradient of the rows.
        strips: How a chunk of rows is summed for the gradient of the weight.
    """

    rows: RowSchedule
    strips: ChunkSchedule


def gradients_schedule(rows: int, columns: int, itemsizes: tuple[int, int]) -> GradientsSchedule | None:
    """Returns the schedule of a launch for both gradients of a norm; None where two launches are faster.

    A launch for both reads the rows from memory once, if those of a chunk, or of a part of one, stay in the cache until
    they are added. Lengths of rows and sizes that are not here were not measured.

    Args:
        rows: Number of rows.
        columns: Columns of a row.
        itemsizes: Bytes of an element of the rows and of the cotangent.

    Example:
        >>> gradients_schedule(512, 8192, (2, 2)).strips.apart, gradients_schedule(4096, 8192, (2, 2)).strips.apart
        (True, False)
        >>> gradients_schedule(512, 128256, (2, 2)).rows.cluster
        8
        >>> gradients_schedule(64, 8192, (2, 2))
    """
    if rows < _ROWS:
        return None
    sizes, many = itemsizes, rows >= _MANY_ROWS

    def held(
        team: int, cluster: int, vector: int, neighbours: int, *, apart: bool = True, ahead: int = 0
    ) -> GradientsSchedule:
        row = RowSchedule(team, rows, hold=True, cluster=cluster, vector=vector, ahead=ahead)
        return GradientsSchedule(row, ChunkSchedule(neighbours, team, apart))

    def read_twice(team: int, cluster: int, vector: int, unroll: int) -> GradientsSchedule:
        # As many registers as the columns take leave one block a multiprocessor.
        row = RowSchedule(team, rows, cluster=cluster, vector=vector, unroll=unroll)
        return GradientsSchedule(row, ChunkSchedule(4, team, apart=True))

    match columns, sizes:
        case 4096, (2, 2):
            return held(2, 1, 8, 2, apart=False) if many else held(1, 1, 8, 4)
        case 4096, (4, 4):
            return held(2, 1, 4, 2, apart=False)
        case 8192, (2, 2):
            return held(2, 1, 8, 4, apart=not many)
        case 8192, (4, 4):
            return held(4, 1, 4, 4)
        case 32000, (2, 2):
            return held(1, 4, 8, 4, ahead=_AHEAD if many else 0)
        case 32000, (4, 4):
            return held(2, 4, 4, 2)
        case 128256, (2, 2):
            return read_twice(1, 8, 8, 3)
        case 128256, (4, 4):
            return read_twice(4, 4, 4, 4)
    return None
