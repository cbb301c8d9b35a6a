"""Schedule of the row operations (norms, softmax family, cross entropy): how many rows go through at once."""

from typing import Final

_TILE_ELEMENTS: Final = 1 << 22


def rows_at_once(rows: int, columns: int) -> int:
    """Returns the rows of one tile: all of them, unless the intermediate results would become large.

    Args:
        rows: Rows that are left, at least 1.
        columns: Columns of a row.

    Example:
        >>> rows_at_once(8, 576), rows_at_once(512, 49152)
        (8, 85)
    """
    return min(rows, max(1, _TILE_ELEMENTS // max(1, columns)))
