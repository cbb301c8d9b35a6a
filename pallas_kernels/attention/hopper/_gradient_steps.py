"""What the kernels of attention's gradients share: what is fixed, their arrays, their steps."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pallas_kernels.attention.hopper._gradient_tiles import Item, Tiles
from pallas_kernels.attention.hopper._scores import Scoring
from pallas_kernels.parts.hopper.tile import ROWS

PARTS: Final = 2
"""Warpgroups that compute; each has 64 keys of a block."""

TURNS: Final = 2
"""Warps that take a warpgroup's steps in turns to add them."""

STATS: Final = 3
"""Numbers of a query: minus its log-sum-exp to base 2, the sum of output times cotangent, whether its tile is bad."""

NEVER: Final = 30  # no block of the grid takes 2 ** 30 steps


@dataclass(frozen=True)
class GradientCall:
    """What is fixed about a call.

    Attributes:
        tiles: The tiles of queries and blocks of keys.
        scale: Factor of the scores.
        scoring: From products to scores.
        size: Width of a head.
        value_size: The same for the values.
        interpret: False, or parameters of Mosaic's interpreter.
        carried: Blocks of keys of all heads whose gradients one block of the grid begins and another one completes.
    """

    tiles: Tiles
    scale: float
    scoring: Scoring
    size: int
    value_size: int
    interpret: Any
    carried: int = 0

    @property
    def columns(self) -> int:
        """Pieces of 64 columns of a head."""
        return self.size // ROWS

    @property
    def rows(self) -> int:
        """Pieces of 64 queries of a tile."""
        return self.tiles.rows // ROWS


class Operands(NamedTuple):
    """Arrays in GPU memory: (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H), and numbers of queries and keys.

    Slopes (B or 1, N) are float32 and times log2(e); None where there are none. The same for the order, the table of a
    `GradientOrder`.
    """

    query: Any
    key: Any
    value: Any
    cotangent: Any
    stats: Any
    marks: Any
    slopes: Any = None
    order: Any = None


class Results(NamedTuple):
    """Gradients in GPU memory; in the interpreter that of queries has a part for each block of keys.

    Attributes:
        query: (B, T', N, H), or (blocks, B, T', N, H) in the interpreter.
        key: (B, S, K, H).
        value: The same.
        carried: Gradients of keys and values (carried blocks * 2, 2, 64, H) float32 of a part of the query heads, None
            where all items are whole.
        turns: Counts of blocks of keys for each tile of queries and warpgroup, then of query heads for each carried
            block and warpgroup; None in the interpreter.
    """

    query: Any
    key: Any
    value: Any
    carried: Any = None
    turns: Any = None


class Step(NamedTuple):
    """A tile of queries of one head with a block of keys.

    Attributes:
        item: The block of keys.
        head: Index of the query head; None where nothing needs it, which saves a division.
        slope: (64,) float32, minus the slope of the head; None without slopes.
        tile: Index of the tile.
        slot: Stage of the queries.
        index: Number of the steps before with this block of keys.
        position: Number of the steps before in this block of the grid.
        part: This warpgroup.
        keys: Which 64 keys of the block it has.
        masked: Whether some query does not see some key, or some key is not finite.
    """

    item: Item
    head: Any
    slope: Any
    tile: Any
    slot: Any
    index: Any
    position: Any
    part: Any
    keys: Any
    masked: Any
