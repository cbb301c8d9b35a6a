"""Hopper schedules of products of rows in groups (experts).

Only the GPU knows the group sizes, so the chosen schedule is close to the best whether the rows are distributed evenly,
unevenly, or all in one group. Sizes affect the time, never the bits.
"""

from dataclasses import replace
from typing import Final

from pallas_kernels.matmul.schedule.hopper.estimate import BYTES_PER_NS, Problem, estimate_ns
from pallas_kernels.matmul.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_RESERVED_BYTES: Final = 1024  # of each block's shared memory, by the system
_RARE: Final = 0.85  # weight of the slowdown with all rows in one group
_ROWS_BESIDE_WEIGHTS: Final = 0.2  # of the time of the weights, for the same bytes of rows
_BARRIER_BYTES: Final = 320  # of all barriers
_ALIGNMENT: Final = 1024  # of shared memory
_STEP: Final = 64  # rows of a gradient stage; groups are padded to a multiple
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
    """Returns the schedule of a shape: the candidate with the smallest estimated worst-case slowdown over group sizes.

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
    """Returns the schedules worth trying for a shape by name, the one with the best worst case first."""
    found: dict[str, MatmulSchedule] = {}
    for rows, stack in ((-(-m // groups), min(groups, m)), (m, 1)):
        found |= candidates(
            rows, k, n, stack=stack, transpose_w=transpose_w, itemsize=itemsize, out_itemsize=out_itemsize
        )
    found = {
        name: in_groups(schedule, groups, itemsize, out_itemsize)
        for name, schedule in found.items()
        if holds_groups(schedule, out_itemsize)
    }
    times = {
        name: _times(schedule, Problem(groups, m, k, n, transpose_w, itemsize, out_itemsize))
        for name, schedule in found.items()
    }
    best = [min(each) for each in zip(*times.values(), strict=True)]

    def worst(name: str) -> float:
        """Worst-case slowdown of a schedule relative to the fastest, over all group sizes."""
        even, uneven, one = (time / least for time, least in zip(times[name], best, strict=True))
        return float(max(even, uneven, _RARE * one))

    return {name: found[name] for name in sorted(found, key=worst)}


def _times(schedule: MatmulSchedule, problem: Problem) -> tuple[float, ...]:
    """Returns rough times for rows distributed evenly, unevenly, and all in one group."""
    groups, m = min(problem.stack, problem.m), problem.m
    resident, tile = schedule.blocks // SMS, schedule.block_m
    full = min(tile, m)  # rows copied for a tile, of its group or a neighbour
    weights = groups * problem.k * problem.n * problem.itemsize / BYTES_PER_NS
    weights *= 1 + _ROWS_BESIDE_WEIGHTS * full / schedule.block_n
    even = estimate_ns(schedule, resident, problem._replace(stack=groups, m=max(full, -(-m // groups))))
    # Uneven groups end in a tile that is half full on average.
    tiles = -(-m // tile) + (groups - 1) // 2
    uneven = estimate_ns(schedule, resident, problem._replace(stack=1, m=tiles * tile))
    return max(even, weights), max(uneven, weights), estimate_ns(schedule, resident, problem._replace(stack=1))


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
        in_groups(schedule, groups, itemsize, out_itemsize)
        for schedule in found.values()
        if not schedule.swap and schedule.split == "rows" and schedule.k_step == _STEP
    )


def holds_groups(schedule: MatmulSchedule, out_itemsize: int) -> bool:
    """Whether a tile is stored in whole swizzled rows, so that any number of rows can be stored."""
    return schedule.swap or schedule.tile_columns * out_itemsize % _ROW_BYTES == 0


def in_groups(schedule: MatmulSchedule, groups: int, itemsize: int, out_itemsize: int) -> MatmulSchedule:
    """Returns the schedule with one wave of blocks, and with room for the group table."""
    if bytes_in_groups(schedule, groups, itemsize, out_itemsize) > SHARED_BYTES:
        schedule = replace(schedule, out_buffers=1)
    while bytes_in_groups(schedule, groups, itemsize, out_itemsize) > SHARED_BYTES:
        schedule = replace(schedule, stages=schedule.stages - 1)
    used = bytes_in_groups(schedule, groups, itemsize, out_itemsize) + _RESERVED_BYTES
    fit = 2 if schedule.warpgroups == 1 and 2 * used <= SHARED_BYTES + _RESERVED_BYTES else 1
    return replace(schedule, blocks=fit * SMS)


def bytes_in_groups(schedule: MatmulSchedule, groups: int, itemsize: int, out_itemsize: int) -> int:
    """Returns the shared memory of a block with its table of two numbers per group."""
    table = -(-8 * groups // _ALIGNMENT) * _ALIGNMENT
    return schedule.buffer_bytes(itemsize, out_itemsize) + table + _BARRIER_BYTES
