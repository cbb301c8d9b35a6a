"""Which Hopper schedule multiplies rows in groups (experts) fast.

The sizes of groups are known on the GPU only, so tiles follow the rows that a group has on the average. Rows that are
spread unevenly cost more tiles, or emptier ones, never other bits.
"""

from dataclasses import replace
from typing import Final

from pallas_kernels.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_RESERVED_BYTES: Final = 1024  # of each block's shared memory, by the system
_FEW_ROWS: Final = 64
_STEP: Final = 64  # rows of a stage of a gradient: the rows of a group are filled up to a multiple
_ROW_BYTES: Final = 128


def group_schedule(
    m: int,
    groups: int,
    k: int,
    n: int,
    *,
    transpose_w: bool = False,
    itemsize: int = 2,
    out_itemsize: int = 2,
) -> MatmulSchedule:
    """Returns the schedule of a shape: the candidate that is estimated fastest.

    Args:
        m: Rows of all groups, at least 1.
        groups: Number of groups, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        transpose_w: Whether the weights are stored as (N, K).
        itemsize: Bytes of an operand's element.
        out_itemsize: Bytes of a result's element.

    Example:
        >>> group_schedule(64, 64, 4096, 4096).swap, group_schedule(65536, 64, 4096, 4096).swap
        (True, False)
    """
    found = group_candidates(m, groups, k, n, transpose_w=transpose_w, itemsize=itemsize, out_itemsize=out_itemsize)
    return next(iter(found.values()))


def group_candidates(
    m: int,
    groups: int,
    k: int,
    n: int,
    *,
    transpose_w: bool = False,
    itemsize: int = 2,
    out_itemsize: int = 2,
) -> dict[str, MatmulSchedule]:
    """Returns the schedules that are worth trying for a shape by name, the one with the lowest estimated time first."""
    rows = expected_rows(m, groups)
    found = candidates(
        rows, k, n, stack=min(groups, m), transpose_w=transpose_w, itemsize=itemsize, out_itemsize=out_itemsize
    )
    return {
        name: in_groups(schedule, itemsize, out_itemsize)
        for name, schedule in found.items()
        if holds_groups(schedule, out_itemsize) and _covers(schedule, rows)
    }


def sums_schedule(m: int, groups: int, k: int, n: int, *, itemsize: int = 2, out_itemsize: int = 4) -> MatmulSchedule:
    """Returns the schedule of the gradient (G, K, N) of weights.

    Args:
        m: Rows of all groups, at least 1.
        groups: Number of groups, at least 1.
        k: Rows of a group's gradient, at least 1.
        n: Columns of it, at least 1.
        itemsize: Bytes of an operand's element.
        out_itemsize: Bytes of a result's element.

    Example:
        >>> sums_schedule(65536, 64, 4096, 2048).k_step
        64
    """
    found = candidates(k, -(-m // groups), n, stack=groups, itemsize=itemsize, out_itemsize=out_itemsize)
    return next(
        in_groups(schedule, itemsize, out_itemsize)
        for schedule in found.values()
        if not schedule.swap and schedule.split == "rows" and schedule.k_step == _STEP
    )


def expected_rows(m: int, groups: int) -> int:
    """Returns for how many rows of a group the tiles are chosen.

    A tile for few rows reads all weights of its group, whatever rows it has: tiles for twice as many rows as a group
    has on the average cost little, and few groups need a second one.
    """
    average = -(-m // groups)
    return min(m, 2 * average) if average <= _FEW_ROWS else average


def holds_groups(schedule: MatmulSchedule, out_itemsize: int) -> bool:
    """Whether the rows of a tile leave in whole swizzled rows, so that any number of them can."""
    return schedule.swap or schedule.tile_columns * out_itemsize % _ROW_BYTES == 0


def in_groups(schedule: MatmulSchedule, itemsize: int, out_itemsize: int) -> MatmulSchedule:
    """Returns the schedule with as many blocks as the GPU holds at once, which walk the tiles of all groups."""
    used = schedule.shared_bytes(itemsize, out_itemsize) + _RESERVED_BYTES
    fit = 2 if schedule.warpgroups == 1 and 2 * used <= SHARED_BYTES + _RESERVED_BYTES else 1
    return replace(schedule, blocks=fit * SMS)


def _covers(schedule: MatmulSchedule, rows: int) -> bool:
    """Whether few rows are one tile: a second one would read the weights again."""
    return rows > _FEW_ROWS or schedule.block_m >= rows
