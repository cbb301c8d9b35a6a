"""How many lanes a row has on a Hopper GPU where its bits do not depend on them."""

from collections.abc import Sequence
from typing import Final

from pallas_kernels.schedule.hopper.rows import GROUP, HELD, HELD_COLUMNS, MOST_LANES, TEAMS
from pallas_kernels.schedule.hopper.tiles import SMS

_LEAST_LANES: Final = 1024  # 8 columns for each thread of a warpgroup
_PICKED_COLUMNS: Final = 1024  # of all arrays, for programs that could also have more lanes


def row_lanes(rows: int, columns: int, itemsizes: Sequence[int]) -> int:
    """Returns the lanes for programs that are exact in any order.

    For many rows that fit, these are the columns that the fewest warpgroups can hold at once, so that few threads pay
    the fixed cost of a row, an exchange and some divisions; 128 if a warp can process a row.

    Args:
        rows: Number of rows.
        columns: Columns of a row.
        itemsizes: Bytes of an element of each array that is read row by row.

    Example:
        >>> row_lanes(8192, 7168, (2,)), row_lanes(8, 7168, (2,)), row_lanes(8, 768, (2,)), row_lanes(8192, 768, (2,))
        (1024, 4096, 1024, 128)
    """
    longest = max(_LEAST_LANES, min(MOST_LANES, 1 << columns.bit_length() - 1))
    if rows <= SMS:
        return longest
    if columns * len(itemsizes) <= _PICKED_COLUMNS and columns < _LEAST_LANES:
        return GROUP
    team = next((t for t in TEAMS if _is_held(columns, itemsizes, t)), None)
    return longest if team is None else GROUP * (4 if max(itemsizes) > 2 else 8) * team


def _is_held(columns: int, itemsizes: Sequence[int], team: int) -> bool:
    registers, held = columns * sum(itemsizes) / (4 * GROUP), columns * len(itemsizes) / GROUP
    return max(registers, held) / team <= HELD_COLUMNS and registers / team <= HELD
