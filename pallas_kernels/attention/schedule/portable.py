"""Schedules of the XLA programs of attention on a GPU: as much at once as fits into some memory.

An element-wise program has the same bits at every size, so a tile may depend on the batch.
"""

from typing import Final

from pallas_kernels.attention.schedule.blockwise import Tile
from pallas_kernels.contract import QUERY_BLOCK

_ROWS: Final = 1 << 17
"""Rows of all heads that a program takes at once: 64 MiB for each array of scores of a block of keys."""

_MOST_QUERIES: Final = 512


def attention_tile(batch: int, queries: int, heads: int) -> Tile:
    """Returns the tile of the forward pass.

    Args:
        batch: Number of sequences, at least 1.
        queries: Queries of each sequence, at least 1.
        heads: Query heads.

    Example:
        >>> attention_tile(16, 1, 32)[:2], attention_tile(4, 4096, 32)[:2]
        ((16, 1), (4, 512))
    """
    taken = min(queries, _MOST_QUERIES, max(1, _ROWS // heads))
    return Tile(max(1, min(batch, _ROWS // (heads * taken))), taken)


def gradient_tile(queries: int, heads: int) -> Tile:
    """Returns the tile of the backward pass, which takes one sequence at once and whole blocks of queries.

    Example:
        >>> gradient_tile(100, 32).queries, gradient_tile(4096, 32).queries
        (112, 512)
    """
    taken = min(queries, _MOST_QUERIES, max(1, _ROWS // heads))
    return Tile(1, -(-taken // QUERY_BLOCK) * QUERY_BLOCK)
