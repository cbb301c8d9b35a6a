"""Schedules of the Triton attention kernels, by the width of a head. None changes a bit."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class AttentionTile:
    """What one block of threads takes.

    Attributes:
        rows: Rows of the forward kernel and of the gradient of queries.
        warps: Warps of a block.
        stages: Blocks of keys that are read ahead.
        keys: Keys of the gradient of keys and values.
    """

    rows: int
    warps: int
    stages: int
    keys: int = 64


_WIDE: Final = 128
_WIDEST: Final = 256

# What fits into the shared memory of an A100 and, where it can, into the registers of a thread.
_FORWARD: Final = {
    _WIDE: {2: AttentionTile(64, 4, 3), 4: AttentionTile(64, 4, 1)},
    _WIDEST: {2: AttentionTile(64, 8, 2), 4: AttentionTile(64, 8, 1)},
}
_BACKWARD: Final = {
    _WIDE: {2: AttentionTile(64, 4, 1, keys=32), 4: AttentionTile(64, 4, 1, keys=32)},
    _WIDEST: {2: AttentionTile(64, 8, 1), 4: AttentionTile(32, 8, 1, keys=32)},
}
_ANY_WIDTH: Final = AttentionTile(16, 4, 1, keys=16)


def attention_tile(size: int, item_bytes: int, *, backward: bool = False) -> AttentionTile:
    """Returns the tile of a kernel.

    Args:
        size: Width of a head.
        item_bytes: Bytes of an element of the operands, 2 or 4.
        backward: Whether for the backward kernels.

    Example:
        >>> attention_tile(128, 2).warps, attention_tile(256, 2).warps
        (4, 8)
    """
    tiles = _BACKWARD if backward else _FORWARD
    return next((by_bytes[item_bytes] for widest, by_bytes in tiles.items() if size <= widest), _ANY_WIDTH)
