"""How far ahead of its own row a block asks the L2 cache for another one, on a Hopper GPU."""

from collections.abc import Sequence
from typing import Final

_LONG_ROW: Final = 2_048  # columns
_MANY_BYTES: Final = 32_000_000
_BYTES_AHEAD: Final = 528 * 8192  # measured with rows of 2048 to 128256 columns


def asks_ahead(rows: int, columns: int, itemsizes: Sequence[int]) -> bool:
    """Returns whether rows are long and many enough that memory would wait while blocks compute.

    Example:
        >>> asks_ahead(4096, 4096, (2,)), asks_ahead(512, 4096, (2,))
        (True, False)
    """
    return set(itemsizes) == {2} and columns >= _LONG_ROW and rows * columns * sum(itemsizes) >= _MANY_BYTES


def rows_ahead(columns: int, itemsizes: Sequence[int]) -> int:
    """Returns how many rows ahead of its own a block asks for: as many bytes, whatever the rows.

    Example:
        >>> rows_ahead(4096, (2,)), rows_ahead(128256, (2,))
        (528, 16)
    """
    return max(1, _BYTES_AHEAD // (columns * sum(itemsizes)))
