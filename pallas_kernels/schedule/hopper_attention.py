"""Schedules of attention on a Hopper GPU, as data: none of them moves a bit."""

from dataclasses import dataclass
from typing import Final

SMS: Final = 132
"""Multiprocessors of an H100 or H200."""

SHARED_BYTES: Final = 227 * 1024
"""Shared memory of a block."""

DECODE_QUERIES: Final = 16
"""Most queries of a sequence for which the heads that share a key head are packed into one tile."""

WIDEST_PARKED: Final = 128
"""Widest heads for whose values shared memory has room beside the stages while other splits are computed."""

_PREFILL_STAGES: Final = {64: 4, 96: 3, 128: 2, 192: 3, 256: 2}
_DECODE: Final = {64: (3, 2), 96: (2, 2), 128: (3, 1), 192: (3, 1), 256: (2, 1)}  # stages and pairs
_FULL_GROUP: Final = 16


@dataclass(frozen=True)
class PrefillSchedule:
    """Tiles of 64 queries of one head for each computing warpgroup, walked by persistent blocks.

    Attributes:
        warpgroups: Computing warpgroups, which take turns at the tensor core; 1 or 2.
        stages: Stages of keys and of values.
        blocks: Most blocks.
        heads: Heads whose tiles are walked together, the longest tiles of a group first; 0 for all.
        registers: Registers of a thread that computes and of one that copies.
    """

    warpgroups: int = 2
    stages: int = 2
    blocks: int = SMS
    heads: int = 0
    registers: tuple[int, int] = (240, 24)


@dataclass(frozen=True)
class DecodeSchedule:
    """Tiles of 64 rows, packed from queries and heads, each with one split of the keys.

    Attributes:
        stages: Stages of keys and of values of a pair.
        blocks: Most blocks.
        pairs: Pairs of a warpgroup that computes and one that copies in a block, each with items of its own.
        registers: Registers of a thread that computes and of one that copies, where there are several pairs.
    """

    stages: int = 3
    blocks: int = SMS
    pairs: int = 1
    registers: tuple[int, int] = (208, 40)


def prefill_schedule(head_size: int, sees_all: bool) -> PrefillSchedule:
    """Returns the schedule of tiles of queries.

    Args:
        head_size: Width of a head.
        sees_all: Whether all tiles are of one length, with neither a causal mask nor a window.
    """
    return PrefillSchedule(stages=_PREFILL_STAGES[head_size], heads=_FULL_GROUP if sees_all else 0)


def decode_schedule(head_size: int) -> DecodeSchedule:
    """Returns the schedule of packed tiles.

    Args:
        head_size: Width of a head.
    """
    stages, pairs = _DECODE[head_size]
    return DecodeSchedule(stages, pairs=pairs)
