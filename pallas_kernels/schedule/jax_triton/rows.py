"""Schedules of row kernels in Triton: how many rows and warps a program has. They do not affect the bits.

The rule was chosen from the times of `benchmarks/notes/jax-triton.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pallas_kernels.target import HOPPER_MULTIPROCESSORS

_WARP: Final = 32
_SHORT: Final = 128  # lanes of a short row
_SHORT_ROWS: Final = 8
_SHORT_WARPS: Final = 4  # of such rows with one block
_LONE_ROWS: Final = 2048  # of several blocks with a warp and a program each
_FEW_ROWS: Final = HOPPER_MULTIPROCESSORS
_MOST_WARPS: Final = 16
_MOST_WARPS_OF_WIDE: Final = 32  # of rows that are not held
_BYTES: Final = 32  # of an array that a thread holds in a block, if there are many rows
_COLUMNS_OF_FEW: Final = 8  # of a thread in a block
_HELD_COLUMNS: Final = 64  # that a thread may hold
_REREAD_BYTES: Final = 2  # of an element: the L2 cache gives wide rows of 16 bits back as fast as warps hold them
_AHEAD_BYTES: Final = 128  # of all arrays that a thread reads ahead
_COLUMNS_AHEAD: Final = 32  # of several arrays, in float32 registers
_MOST_AHEAD: Final = 8
_MOST_ROWS_OF_PARTS: Final = 16
_LEAST_BLOCKS_OF_PARTS: Final = 8  # of one program's row; fewer take less time than more kernels
_MOST_BLOCKS_OF_PARTS: Final = 32  # that a program holds


@dataclass(frozen=True)
class RowSchedule:
    """How rows are distributed over programs.

    Attributes:
        rows: Rows of a program; a power of two.
        warps: Warps of a program; a power of two.
        held: Keep the rows in registers from the first pass to the last; otherwise every pass reads them.
        ahead: Blocks of a row that a pass reads before it computes with them, if they are not held.
        preload: Read vectors that all rows share before a row is added, if the row is held: a single row need not wait
            for memory a second time.
        parts: Programs that share a row, each with some of the lanes of all blocks, which it holds. Each sum then has a
            kernel of its own.

    Raises:
        ValueError: If a number is not a power of two, or vectors are to be preloaded and rows not to be held, or a row
            has parts and a program more than one row or rows that it does not hold.
    """

    rows: int
    warps: int
    held: bool
    ahead: int = 1
    preload: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "warps", "ahead", "parts"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}.")
        if self.preload and not self.held:
            raise ValueError(f"vectors are preloaded only if rows are held, got {self}.")
        if self.parts > 1 and not (self.rows == 1 and self.held):
            raise ValueError(f"a program that has a part of a row holds no other, got {self}.")


def row_schedule(
    rows: int, columns: int, lanes: int, itemsizes: Sequence[int], *, writes: bool = True, sums: int = 1
) -> RowSchedule:
    """Returns the schedule for `rows` rows of `columns` columns.

    Args:
        rows: Number of rows, at least 1.
        columns: Columns of a row.
        lanes: Lanes of the row's contract.
        itemsizes: Bytes of an element of each array that is read row by row.
        writes: Whether there is a result of whole rows.
        sums: Sums of a row of which each needs the one before.

    Example:
        >>> row_schedule(4096, 4096, 4096, (2,))
        RowSchedule(rows=1, warps=8, held=True, ahead=1, preload=False, parts=1)
        >>> row_schedule(4096, 128256, 8192, (2,))
        RowSchedule(rows=1, warps=32, held=False, ahead=8, preload=False, parts=1)
    """
    few, blocks, size, arrays = rows <= _FEW_ROWS, -(-columns // lanes), sum(itemsizes), len(itemsizes)
    if lanes <= _SHORT:
        single = arrays == 1 and writes
        # Sums of several rows cost more than those of one, which is a scalar.
        if few or (single and blocks > 1 and (rows <= _LONE_ROWS or size > _REREAD_BYTES or sums > 1)):
            return RowSchedule(1, 1, held=True, preload=True)
        return RowSchedule(_SHORT_ROWS, _SHORT_WARPS if single and blocks == 1 else _SHORT_ROWS, held=True)
    if blocks <= 2:
        if few:
            warps = lanes // (_COLUMNS_OF_FEW * _WARP)
        else:
            warps = min(4 * size, lanes * max(itemsizes) // (_BYTES * _WARP))
        # Without a result of whole rows, the exchange of a sum costs more than the columns.
        warps = min(_MOST_WARPS, warps) // (1 if writes else 2)
        columns_held = blocks * lanes * arrays // _WARP
        least = 1 << (-(-columns_held // (_HELD_COLUMNS if arrays == 1 else _HELD_COLUMNS // 2)) - 1).bit_length()
        return RowSchedule(1, max(warps, min(_MOST_WARPS_OF_WIDE, least)), held=True, preload=few)
    if size > _REREAD_BYTES and blocks * lanes * arrays // (_WARP * _MOST_WARPS) <= _HELD_COLUMNS:
        return RowSchedule(1, _MOST_WARPS, held=True)
    warps, ahead = _MOST_WARPS_OF_WIDE if writes or few else _MOST_WARPS, _MOST_AHEAD
    while ahead > 1 and _bytes(ahead, lanes, size, warps) > _AHEAD_BYTES:
        ahead //= 2
    while arrays > 1 and ahead > 1 and _bytes(ahead, lanes, arrays, warps) > _COLUMNS_AHEAD:
        ahead //= 2
    return RowSchedule(1, warps, held=False, ahead=ahead)


def schedule_of_parts(rows: int, columns: int, lanes: int) -> RowSchedule | None:
    """Returns the schedule of wide rows of which there are too few for a program each to fill a GPU; or None.

    Args:
        rows: Number of rows, at least 1.
        columns: Columns of a row.
        lanes: Lanes of the row's contract.

    Example:
        >>> schedule_of_parts(8, 128256, 8192)
        RowSchedule(rows=1, warps=8, held=True, ahead=1, preload=True, parts=16)
        >>> schedule_of_parts(8, 4096, 4096)
    """
    blocks = -(-columns // lanes)
    if rows > _MOST_ROWS_OF_PARTS or not _LEAST_BLOCKS_OF_PARTS <= blocks <= _MOST_BLOCKS_OF_PARTS:
        return None
    groups = lanes // _SHORT
    parts = min(groups, 1 << ((_FEW_ROWS // rows).bit_length() - 1))
    # For 32 columns of an array in a thread.
    warps = groups // parts * (2 if blocks <= _MOST_BLOCKS_OF_PARTS // 2 else 4)
    return RowSchedule(1, warps, held=True, preload=True, parts=parts)


def _bytes(blocks: int, lanes: int, size: int, warps: int) -> int:
    """Returns the bytes of a thread's columns in some blocks, whose arrays have `size` bytes a column."""
    return blocks * lanes * size // (_WARP * warps)
