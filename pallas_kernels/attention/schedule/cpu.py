"""Schedules of attention: how many sequences, queries and keys a program takes at once, as data.

All tiles mean the same contract. `pallas_kernels.attention.cpu.launch` compares each one with `REFERENCE`, bit for bit,
before it is used on a machine.
"""

from typing import Final

from pallas_kernels.attention.schedule.blockwise import Tile as Tile
from pallas_kernels.contract import KEY_BLOCK, QUERY_BLOCK, SCORE_BLOCK

REFERENCE: Final = Tile(1, 1)

GRADIENT_REFERENCE: Final = Tile(1, QUERY_BLOCK)

_GRADIENT_WIDE: Final = Tile(1, 4 * QUERY_BLOCK)

# The most sequences that are taken at once, by number of queries: a longer program costs more than it saves.
_SEQUENCES: Final = {1: 8, 4: 8, 16: 4, 64: 1}

_NARROW_KEYS: Final = KEY_BLOCK // 2

_MOST_CROSSED: Final = 4
"""Key heads that are crossed with each other: with more, their products take longer than the copy that they save."""

_MOST_CROSSED_SEQUENCES: Final = 64


def attention_tiles(batch: int, queries: int, capacity: int, *, heads: int, size: int) -> tuple[Tile, ...]:
    """Returns the tiles in the order in which to try them.

    Args:
        batch: Number of sequences, at least 1.
        queries: Queries of each sequence, at least 1.
        capacity: Keys for which the cache has room in a sequence.
        heads: Key heads.
        size: Width of a head.
    """
    ladder = sorted(_SEQUENCES)
    first = next((i for i, q in enumerate(ladder) if q >= queries), len(ladder) - 1)
    fitting = [Tile(min(batch, _SEQUENCES[q]), q) for q in reversed(ladder[: first + 1])]
    if queries == 1 < heads <= _MOST_CROSSED and size <= SCORE_BLOCK:
        fitting = [Tile(_crossed_sequences(batch), 1, crossed=True), *fitting]
    narrow = [t._replace(keys=_NARROW_KEYS) for t in fitting] if capacity <= _NARROW_KEYS else []
    single = [t._replace(sequences=1) for t in fitting]
    tiles = [*_without_loop([*narrow, *fitting], capacity), *narrow, *fitting, *single, REFERENCE]
    return tuple(dict.fromkeys(tiles))


def _crossed_sequences(batch: int) -> int:
    """Returns the sequences of a crossed tile: XLA runs one long program faster than a loop over short ones.

    From 8 sequences on they are powers of two, so that few programs are compared with the reference.
    """
    return batch if batch < 8 else min(1 << (batch.bit_length() - 1), _MOST_CROSSED_SEQUENCES)


def gradient_tiles(queries: int, capacity: int) -> tuple[Tile, ...]:
    """Returns the tiles of the backward pass in the order in which to try them.

    Args:
        queries: Queries of each sequence.
        capacity: Keys of each sequence.
    """
    wide = [_GRADIENT_WIDE] if queries > QUERY_BLOCK else []
    return (*_without_loop(wide, capacity), *wide, GRADIENT_REFERENCE)


def _without_loop(tiles: list[Tile], capacity: int) -> list[Tile]:
    """Returns the tiles for one block of keys; the reference, which is compared with nothing, keeps its loop."""
    return [t._replace(one_block=True) for t in tiles if capacity <= KEY_BLOCK and t != REFERENCE]
