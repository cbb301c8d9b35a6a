"""Schedules of the row operations (norms, softmax family, cross entropy) and of element-wise programs."""

import os
from typing import Final

_TILE_ELEMENTS: Final = 1 << 22
_HEAVY: Final = 512


def rows_at_once(rows: int, columns: int) -> int:
    """Returns the rows of one tile: all of them, unless the intermediate results would become large.

    Args:
        rows: Remaining rows, at least 1.
        columns: Columns of a row.

    Example:
        >>> rows_at_once(8, 576), rows_at_once(512, 49152)
        (8, 85)
    """
    return min(rows, max(1, _TILE_ELEMENTS // max(1, columns)))


def vector_rows(rows: int, arrays: int, steps: int) -> int:
    """Returns the rows (of one vector each) of an element-wise program, so that no row is split between threads.

    XLA:CPU distributes rows over threads, and also splits a row if there are fewer rows than threads that its cost
    model considers worthwhile. It estimates about 40 per element for each array plus a few units for each operation,
    and 100000 per thread; so heavier programs get at least as many rows as threads.

    Args:
        rows: Rows that the elements occupy.
        arrays: Arguments of the program.
        steps: Operations of the program.

    Example:
        >>> vector_rows(5, arrays=2, steps=10)
        5
    """
    return max(rows, os.cpu_count() or 1) if 40 * (arrays + 1) + 8 * steps > _HEAVY else rows
