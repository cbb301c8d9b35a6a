"""Schedules of the Triton kernels that route tokens and copy rows; nothing is rounded, so the bits cannot change."""

import math
from dataclasses import dataclass
from typing import Final

COPIED: Final = ("float32", "bfloat16", "float16", "int8")
"""Dtypes of the rows that kernels copy."""

_WARP: Final = 32
_COLUMNS_OF_WARP: Final = 2048  # 64 registers of a thread
_PART_COLUMNS: Final = 256
_THREAD_BYTES: Final = 16  # of one load or store instruction
_PIECE_BYTES: Final = 2048
_LEAST_COLUMNS: Final = 32
_MOST_WARPS: Final = 4
_MOST_PIECES: Final = 8


@dataclass(frozen=True)
class PairTile:
    """The items that one thread block compares with all others.

    Attributes:
        items: Items of a block; a power of two.
        chunk: Items that they are compared with at once; a power of two.
        warps: Warps of a block.
    """

    items: int
    chunk: int
    warps: int


PAIR_TILE: Final = PairTile(items=16, chunk=128, warps=4)
MOST_PAIRS: Final = 1 << 25
"""Maximum number of comparisons that take less time than XLA's sort."""

MOST_PLACED: Final = 1 << 20
"""Maximum number of comparisons that take less time than a scatter."""


_FEW_ADDED: Final = 8192  # rows
SEARCHED: Final = 1024
"""Maximum number of rows that each block of a sum of expert rows searches by itself; for more, a scatter is faster."""


@dataclass(frozen=True)
class SumTile:
    """The columns of a token that one thread block adds.

    Attributes:
        piece: Columns of a block; a power of two.
        warps: Warps of a block.
        chunk: Offsets that a block searches at once; a power of two.
    """

    piece: int
    warps: int
    chunk: int


def sum_tile(rows: int) -> SumTile:
    """Returns the columns of a token that one thread block adds, of `rows` rows of experts.

    Example:
        >>> [sum_tile(rows).piece for rows in (64, 4096, 16384)]
        [2048, 512, 256]
    """
    if rows <= SEARCHED:
        return SumTile(2048, 8, 512)
    return SumTile(512, 4, 512) if rows <= _FEW_ADDED else SumTile(256, 1, 512)


@dataclass(frozen=True)
class TopTile:
    """The parts of a row that one thread block holds.

    Attributes:
        columns: Columns of a part; a power of two.
        parts: Parts of the row.
        warps: Warps of the block.
    """

    columns: int
    parts: int
    warps: int


def topk_tile(columns: int) -> TopTile:
    """Returns the parts of a row of which the largest numbers are found.

    Example:
        >>> topk_tile(128), topk_tile(4096)
        (TopTile(columns=128, parts=1, warps=1), TopTile(columns=2048, parts=2, warps=4))
    """
    width = 1 << (columns - 1).bit_length()
    if width > _COLUMNS_OF_WARP:
        return TopTile(width // 2, 2, 4)
    part = min(width, _PART_COLUMNS)
    return TopTile(part, -(-columns // part), 1)


def piece_columns(columns: int, itemsize: int) -> int:
    """Returns the columns that a block copies at once: the largest power of two that divides the row.

    Example:
        >>> piece_columns(7168, 2), piece_columns(768, 2), piece_columns(100, 2)
        (1024, 256, 4)
    """
    return math.gcd(columns, max(1, _PIECE_BYTES // itemsize))


def copies_rows(columns: int, itemsize: int) -> bool:
    """Whether the pieces of rows are long enough for a block's threads."""
    return piece_columns(columns, itemsize) >= _LEAST_COLUMNS


def copy_warps(columns: int, itemsize: int) -> int:
    """Returns the warps that copy a row.

    Example:
        >>> copy_warps(7168, 2), copy_warps(768, 2)
        (4, 1)
    """
    return max(1, min(_MOST_WARPS, piece_columns(columns, itemsize) * itemsize // (_THREAD_BYTES * _WARP)))


def pieces_at_once(columns: int, itemsize: int) -> int:
    """Returns the pieces of a row that a block holds at once: a power of two.

    Example:
        >>> pieces_at_once(7168, 2), pieces_at_once(768, 2), pieces_at_once(64, 1)
        (8, 4, 1)
    """
    pieces = columns // piece_columns(columns, itemsize)
    return min(_MOST_PIECES, 1 << max(0, pieces - 1).bit_length())
