"""Hopper schedules of products of 8-bit operands.

A step of wgmma takes 32 bytes of K for any dtype, so 8-bit operands behave like 16-bit ones of half the length.
"""

from dataclasses import replace
from typing import Final

from pallas_kernels.matmul.schedule.hopper.group_matmul import group_candidates, in_groups
from pallas_kernels.matmul.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, MatmulSchedule

_TRANSPOSED_BYTES: Final = 32 * 1024  # 64 registers of each thread
_TRANSPOSED_COLUMNS: Final = 128
_TRANSPOSED_SUMS: Final = 128 * 128
_BLOCK: Final = 128  # of K, whose float8 products are summed separately
_FOLDED_SUMS: Final = 64 * 192
_FOLDED_COLUMNS: Final = 128
_MOST_STAGES: Final = 16
_TRANSPOSED_ROWS: Final = 4096
_NARROW: Final = 32  # up to here int8 wgmma takes multiples of 8 columns, beyond it multiples of 16


def int8_schedule(
    m: int, k: int, n: int, *, groups: int | None = None, transposed_w: bool = False, out_itemsize: int = 2
) -> MatmulSchedule:
    """Returns the schedule of a shape: the candidate that is estimated fastest.

    Args:
        m: Rows, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        groups: Number of groups of rows, each with its weights; None for one weight matrix.
        transposed_w: Whether a warpgroup transposes (K, N) weights.
        out_itemsize: Bytes of a result's element.

    Example:
        >>> int8_schedule(8, 4096, 4096).swap, int8_schedule(8192, 4096, 4096).swap
        (True, False)
    """
    return next(
        iter(int8_candidates(m, k, n, groups=groups, transposed_w=transposed_w, out_itemsize=out_itemsize).values())
    )


def int8_candidates(
    m: int, k: int, n: int, *, groups: int | None = None, transposed_w: bool = False, out_itemsize: int = 2
) -> dict[str, MatmulSchedule]:
    """Returns the schedules worth trying for a shape by name, the one with the lowest estimated time first."""
    pairs = -(-k // 2)
    if groups is None:
        found = candidates(m, pairs, n, transpose_w=True, out_itemsize=out_itemsize)
    else:
        found = group_candidates(m, groups, pairs, n, transpose_w=True, out_itemsize=out_itemsize)
    wide = {name: replace(schedule, k_step=2 * schedule.k_step) for name, schedule in found.items()}
    return {
        name: schedule
        for name, schedule in wide.items()
        if takes_integers(schedule) and (not transposed_w or transposes_weights(schedule))
    }


def float8_schedule(m: int, k: int, n: int, *, groups: int | None = None, out_itemsize: int = 2) -> MatmulSchedule:
    """Returns the schedule of a float8 product; arguments as for `int8_schedule`.

    Example:
        >>> float8_schedule(8, 4096, 4096).k_step, float8_schedule(8192, 4096, 4096).k_step
        (128, 128)
    """
    return next(iter(float8_candidates(m, k, n, groups=groups, out_itemsize=out_itemsize).values()))


def float8_candidates(
    m: int, k: int, n: int, *, groups: int | None = None, out_itemsize: int = 2
) -> dict[str, MatmulSchedule]:
    """Returns the schedules of float8 products by name: the int8 schedules that fold blocks of K."""
    found = int8_candidates(m, k, n, groups=groups, out_itemsize=out_itemsize)
    cut: dict[str, MatmulSchedule] = {}
    for s in found.values():
        schedule = replace(s, tile_rows=64, tile_columns=min(s.tile_columns, _FOLDED_COLUMNS), k_step=_BLOCK)
        schedule = replace(schedule, stages=_MOST_STAGES, split="rows")
        while schedule.shared_bytes(1, out_itemsize) > SHARED_BYTES:
            schedule = replace(schedule, stages=schedule.stages - 1)
        if groups is not None:
            schedule = in_groups(schedule, groups, 1, out_itemsize)
        side = "weights" if schedule.swap else "rows"
        name = f"{side} 64x{schedule.tile_columns} warpgroups{schedule.warpgroups}"
        if folds_blocks(schedule):
            cut.setdefault(name, schedule)
    return cut


def folds_blocks(schedule: MatmulSchedule) -> bool:
    """Whether a step is a block of K, and a thread has registers for the sums of a block and the running totals."""
    return schedule.k_step == _BLOCK and schedule.tile_rows * schedule.tile_columns <= _FOLDED_SUMS


def transposes_in_kernel(rows: int, groups: int | None = None) -> bool:
    """Whether the kernel should transpose (K, N) weights tile by tile, instead of a copy before it.

    Transposing costs a seventh of the time for many rows (H200); a copy costs the same for any number of rows.

    Example:
        >>> transposes_in_kernel(4096), transposes_in_kernel(8192), transposes_in_kernel(65536, 64)
        (True, False, True)
    """
    return rows // max(1, groups or 1) <= _TRANSPOSED_ROWS


def takes_integers(schedule: MatmulSchedule) -> bool:
    """Whether wgmma has an integer instruction with this number of columns."""
    return schedule.tile_columns % (8 if schedule.tile_columns <= _NARROW else 16) == 0


def transposes_weights(schedule: MatmulSchedule) -> bool:
    """Whether a warpgroup can transpose the weight tiles: their bytes and the sums must fit into registers."""
    in_step = schedule.split == "rows" and schedule.warpgroups <= 2
    if schedule.warpgroups == 2:  # 512 threads start with 128 registers each
        sums = schedule.tile_rows * schedule.tile_columns
        in_step = in_step and schedule.tile_columns <= _TRANSPOSED_COLUMNS and sums <= _TRANSPOSED_SUMS
    return in_step and schedule.block_n % 32 == 0 and schedule.block_n * schedule.k_step <= _TRANSPOSED_BYTES
