"""How far ahead of its own row a block asks the L2 cache for another one, on a Hopper GPU."""

from collections.abc import Sequence
from typing import Final

_LONG_ROW: Final = 1_024  # columns
_LONGEST_PAIR: Final = 8_192  # columns of several arrays; longer ones were not measured
_MANY_ROWS: Final = 2_048
_VERY_LONG: Final = 65_536  # columns, for which fewer rows are many; between the measured 32000 and 128256
_MANY_BYTES: Final = 16_000_000
_BYTES_AHEAD: Final = 528 * 8192  # measured with rows of 1024 to 128256 columns


def rows_ahead(rows: int, columns: int, itemsizes: Sequence[int]) -> int:
    """Returns how many rows ahead of its own a block asks for: as many bytes, whatever the rows.

    Rows that are long and many are asked for, since memory would wait while blocks compute; 0 for others.

    Args:
        rows: Number of rows.
        columns: Columns of a row.
        itemsizes: Bytes of an element of each array that is read row by row.

    Example:
        >>> rows_ahead(4096, 4096, (2,)), rows_ahead(512, 128256, (2,)), rows_ahead(512, 4096, (2,))
        (528, 16, 0)
    """
    size = columns * sum(itemsizes)
    long = columns >= _LONG_ROW and (len(itemsizes) == 1 or columns <= _LONGEST_PAIR)
    many = rows * size >= _MANY_BYTES and (rows >= _MANY_ROWS or columns > _VERY_LONG)
    return max(2, _BYTES_AHEAD // size // 2 * 2) if long and many else 0  # even numbers were measured
