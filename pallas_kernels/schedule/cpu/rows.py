"""Schedules of the row operations (norms, softmax family, cross entropy) and of element-wise programs."""

import os
from typing import Final

_TILE_ELEMENTS: Final = 1 << 22
_HEAVY: Final = 512


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


def vector_rows(rows: int, arrays: int, steps: int) -> int:
    """Returns how many rows of one vector each an element-wise program gets, so that no thread gets part of a row.

    XLA:CPU shares out the rows among its threads, and the elements of a row too when the rows are fewer than the
    threads that it finds worth their while. Its estimate for one element is about 40 for every array and a few units
    for every operation, and a thread is worth 100000; rows of heavier programs are therefore no fewer than threads.

    Args:
        rows: Rows that the elements fill.
        arrays: Arguments of the program.
        steps: Operations of the program.

    Example:
        >>> vector_rows(5, arrays=2, steps=10)
        5
    """
    return max(rows, os.cpu_count() or 1) if 40 * (arrays + 1) + 8 * steps > _HEAVY else rows
