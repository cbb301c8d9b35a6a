"""Schedules of the row kernels with one-pass statistics on a Hopper GPU. They do not affect the bits."""

from dataclasses import dataclass
from typing import Final, Literal

from pallas_kernels.contract import LANES, online_row_contract
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.schedule.hopper.rows import WARP_VECTOR
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS

MOST_WARPGROUPS: Final = 8
MOST_PIECE: Final = 4096
"""Columns of the largest piece of a row in the circular buffer."""

_COPIED: Final = 128  # every thread of a warpgroup announces its share of a copy's bytes
_RESERVED: Final = 2_048  # per block: barriers
_STATISTICS_BYTES: Final = 8 * LANES
_VECTOR_BYTES: Final = 16
_MOST_OF_WARP: Final = 1_024  # columns
_BYTES_OF_WARP: Final = 3_072
_ROWS_FOR_WARPS: Final = 2 * SMS
_ROWS_FOR_ONE_STRIP: Final = range(8192, 32768)  # of 128 columns; measured

Form = Literal["ring", "registers", "split", "warps"]


@dataclass(frozen=True)
class OnlineSchedule:
    """How rows are fed to a kernel.

    Attributes:
        form: "ring": persistent blocks loop over many rows, in pieces prefetched into a circular buffer in shared
            memory. "registers": one block per row, one warpgroup per segment (at most 8), which holds it in registers.
            "split": one block per segment of each row, in two kernels. "warps": a warp, or a part of one, for each row
            of fewer than 1024 columns, a multiple of `vector`.
        piece: For "ring", columns of a piece, a multiple of a segment (or the whole row).
        stages: For "ring", stages of the buffer, each for one piece; a multiple of `warpgroups`.
        blocks: For "ring", blocks on the whole GPU.
        warpgroups: For "ring", warpgroups of a block; at most the number of pieces.
        vector: Neighbouring columns that a thread holds: for "ring" 1, 2, 4 or 8 while writing results, for "warps" 4
            or 8.
        unroll: For "ring", unroll factor of the loop that writes results.
        threads: For "warps", threads that have a row: 32 or fewer, in as many strips as hold its lanes.
    """

    form: Form
    piece: int = 0
    stages: int = 0
    blocks: int = 0
    warpgroups: int = 1
    vector: int = 4
    unroll: int = 4
    threads: int = 32


def segments_of(columns: int, size: int) -> int:
    """Returns the number of parts of a row; fewer than 128 leftover columns are appended to the last part.

    Example:
        >>> segments_of(576, 1024), segments_of(8192, 1024), segments_of(4096 + 100, 4096)
        (1, 8, 1)
    """
    return max(1, (columns - LANES) // size + 1)


def fits_warp(columns: int) -> bool:
    """Returns whether a warp can have a row by itself.

    Example:
        >>> fits_warp(128), fits_warp(130), fits_warp(2048)
        (True, False, False)
    """
    return 0 < columns < _MOST_OF_WARP and columns % WARP_VECTOR == 0


def online_schedule(rows: int, columns: int, itemsize: int) -> OnlineSchedule:
    """Returns the schedule for `rows` rows of `columns` columns of `itemsize` bytes.

    Example:
        >>> online_schedule(1, 128256, 4).form, online_schedule(4096, 32000, 4).form
        ('split', 'ring')
    """
    if fits_warp(columns) and columns * itemsize <= _BYTES_OF_WARP and rows > _ROWS_FOR_WARPS:
        return _short_rows(rows, columns, itemsize)
    segments = segments_of(columns, online_row_contract(columns).segment)
    copied = columns >= LANES and columns * itemsize % _COPIED == 0
    if copied and rows <= SMS and segments_of(columns, MOST_PIECE) == 2:
        # Two warpgroups that take half a row each: more of them wait for each other longer than they read.
        return OnlineSchedule("ring", MOST_PIECE, 2, SMS, 2, min(8, _VECTOR_BYTES // itemsize))
    if segments <= MOST_WARPGROUPS:
        if not copied or rows * segments <= 8 * SMS:
            return OnlineSchedule("registers")
    elif not copied or rows <= SMS // 2:
        # Two kernels cost a launch and a second read; one block per row would leave most of the GPU idle.
        return OnlineSchedule("split")
    ring = ring_schedule(columns, itemsize)
    # The statistics of a very long row leave no room for stages.
    return ring if ring.stages >= 2 else OnlineSchedule("split")


def _short_rows(rows: int, columns: int, itemsize: int) -> OnlineSchedule:
    """Returns how threads of a warp share a short row: as few as have two strips of whole accesses, or of one."""
    vector = _VECTOR_BYTES // itemsize
    if columns > LANES or columns % vector:
        vector = WARP_VECTOR
    lanes = min(LANES, next_power_of_two(columns))
    strips = 1 if vector == WARP_VECTOR or (lanes == LANES and rows in _ROWS_FOR_ONE_STRIP) else 2
    return OnlineSchedule("warps", vector=vector, threads=max(1, lanes // (vector * strips)))


def ring_schedule(columns: int, itemsize: int) -> OnlineSchedule:
    """Returns the schedule for many rows of `columns` columns of `itemsize` bytes, a multiple of 128 bytes in all.

    Example:
        >>> ring_schedule(32000, 4).blocks // SMS
        1
    """
    segments = segments_of(columns, online_row_contract(columns).segment)
    pieces = segments_of(columns, MOST_PIECE)
    piece = MOST_PIECE if pieces > 1 else columns
    stage = -(-min(columns, MOST_PIECE + LANES) // LANES) * LANES * itemsize
    vector = min(8, _VECTOR_BYTES // itemsize)
    # A row, and part of the next one in flight; two pieces are best processed sequentially, in as many blocks as fit.
    wanted = pieces + max(2, pieces // 2) if pieces != 2 else 2
    for each in (16, 12, 8, 6, 4, 3, 2, 1):
        warpgroups = min(pieces, max(1, 8 // each)) if pieces != 2 else 1
        warpgroups = 1 << (warpgroups.bit_length() - 1)
        stages = _stages(each, stage, segments, warpgroups)
        if stages >= wanted:
            stages = min(stages, -(-max(wanted, 2 if pieces == 2 else 4) // warpgroups) * warpgroups)
            return OnlineSchedule("ring", piece, stages, SMS * each, warpgroups, vector)
    warpgroups = min(pieces, 4)
    return OnlineSchedule("ring", piece, _stages(1, stage, segments, warpgroups), SMS, warpgroups, vector)


def _stages(each: int, stage: int, segments: int, warpgroups: int) -> int:
    """Returns the stages, a multiple of `warpgroups`, that `each` blocks of a multiprocessor have room for."""
    shared = min(SHARED_BYTES, (SHARED_BYTES + 1_024) // each - 1_024) - _RESERVED
    shared -= _STATISTICS_BYTES * (warpgroups + segments)
    return max(0, shared // stage // warpgroups * warpgroups)
