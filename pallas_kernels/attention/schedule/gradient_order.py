"""In which order the blocks of the grid compute the gradients of attention under a causal mask.

An item is a block of keys of a key head, with the tiles of queries of all query heads that share the keys. A tile is
read, and the sum of its queries' gradient read and written, once for each block of keys: from the cache if the blocks
of keys follow one another closely. An item has more tiles than that of the next block of keys, so the distance of the
two grows with each query head. Here items are cut into parts of some query heads, and blocks of keys next to each
other begin each part together. The block of the grid that takes the next part continues the sums of the gradients of
keys and values, so no bit depends on the order.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Final, NamedTuple

import numpy as np

HEAD_BITS: Final = 4
"""Bits of a number of a query head in a part's code."""

# In steps: of a tile of queries of one head with a block of keys.
_ITEM_STEPS: Final = 2.5
_CARRY_STEPS: Final = 1.7
_TURN_STEPS: Final = 1.0  # from one block's sums to the next one's
_MISS_STEPS: Final = 0.08  # a tile that is no longer in the cache
_CACHED_TILES: Final = 512  # 32 MB
_SAMPLED: Final = 16  # one tile of so many, and as much of the cache
_MOST_PARTS: Final = 4096
_GAIN: Final = 0.99
_CUTS: Final = (
    (8, 1 / 8, (3 / 4,), False),
    (8, 1 / 4, (1 / 2, 3 / 4), False),
    (16, 1 / 8, (3 / 4,), True),
    (16, 1 / 8, (1 / 2, 3 / 4), False),
    (16, 1 / 2, (1 / 4, 1 / 2, 3 / 4), False),
    (32, 1 / 2, (3 / 4,), False),
    (32, 1 / 2, (1 / 2, 3 / 4), False),
    (32, 1 / 2, (1 / 4, 1 / 2, 3 / 4), False),
)
"""Blocks of keys together, share of blocks below which items are cut, shares of query heads, ascending: see `Cut`."""


class Part(NamedTuple):
    """Some query heads of a block of keys of a key head.

    Attributes:
        head: Index of the key head among those of all sequences.
        block: Index of the block of keys.
        start: First query head of those that share the keys.
        end: End of them.
    """

    head: int
    block: int
    start: int
    end: int


class Cut(NamedTuple):
    """How items become parts, and in which order parts are taken.

    Attributes:
        together: Blocks of keys of a head that begin together.
        below: Items of blocks of keys below this one are cut.
        heads: Query heads at which they are cut.
        ascending: Whether the lowest block of keys of those together begins first.
    """

    together: int
    below: int
    heads: tuple[int, ...]
    ascending: bool


@dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
        heads: Key heads of all sequences.
        group: Query heads per key head.
        steps: Tiles of queries that see each block of keys.
        grid: Blocks of the grid.
    """

    heads: int
    group: int
    steps: tuple[int, ...]
    grid: int

    @property
    def blocks(self) -> int:
        """Blocks of keys of a head."""
        return len(self.steps)

    def code(self, part: Part) -> int:
        """Returns the number that stands for a part: items are counted from the last block of all heads."""
        number = (self.blocks - 1 - part.block) * self.heads + part.head
        return (number << 2 * HEAD_BITS) | (part.start << HEAD_BITS) | (part.end - 1)

    def part(self, code: int) -> Part:
        """Returns the part that a number stands for."""
        number, own = code >> 2 * HEAD_BITS, (1 << HEAD_BITS) - 1
        block, head = divmod(number, self.heads)
        return Part(head, self.blocks - 1 - block, code >> HEAD_BITS & own, (code & own) + 1)


Places = Sequence[Sequence[Part]]
"""The parts of each block of the grid, one after the other."""


@dataclass(frozen=True)
class GradientOrder:
    """The parts that each block of the grid takes, one after the other.

    Attributes:
        codes: The numbers of the parts of each block of the grid.
        carried: Blocks of keys of each head, from the first, that are cut.
    """

    codes: tuple[tuple[int, ...], ...]
    carried: int

    @property
    def table(self) -> np.ndarray:
        """How many parts each block of the grid has, and their numbers (1 + most parts, blocks of the grid)."""
        table = np.zeros((1 + max(len(own) for own in self.codes), len(self.codes)), np.int32)
        for place, own in enumerate(self.codes):
            table[0, place] = len(own)
            table[1 : 1 + len(own), place] = own
        return table


def ends_in_order(work: Work, places: Places) -> list[Part]:
    """Returns the parts in an order in which each can end after those before it, whatever the others do.

    A part needs the part before it in its block of the grid, the part of the same item before it, and the sums of the
    next block of keys for the same query heads.

    Args:
        work: The work.
        places: The parts of each block of the grid.

    Raises:
        graphlib.CycleError: If there is no such order: the grid would stand still.
    """
    of_item: dict[tuple[int, int], list[Part]] = {}
    for own in places:
        for part in own:
            of_item.setdefault(part[:2], []).append(part)
    needs: dict[Part, list[Part]] = {}
    for own in places:
        for before, part in zip((None, *own[:-1]), own, strict=True):
            found = [] if before is None else [before]
            found += [x for x in of_item[part[:2]] if x.end == part.start]
            later = of_item.get((part.head, part.block + 1), [])
            needs[part] = found + [x for x in later if x.start < part.end and part.start < x.end]
    return list(TopologicalSorter(needs).static_order())


@lru_cache(maxsize=256)
def gradient_order(work: Work) -> GradientOrder | None:
    """Returns an order that takes less time than item after item, or None.

    Args:
        work: The work.
    """
    if not 1 < work.group <= 1 << HEAD_BITS or work.heads * work.blocks > _MOST_PARTS:
        return None
    shortest, found = _GAIN * _time(work, _to_and_fro(work)), None
    for cut in _cuts(work):
        places = _arranged(work, cut)
        try:
            time = _time(work, places)
        except CycleError:
            continue
        if time < shortest:
            shortest = time
            codes = tuple(tuple(work.code(part) for part in own) for own in places)
            cut_blocks = [part.block for own in places for part in own if part.end - part.start < work.group]
            found = GradientOrder(codes, 1 + max(cut_blocks, default=-1))
    return found


def _cuts(work: Work) -> Iterator[Cut]:
    """Yields the cuts to choose from."""
    for together, share, places, ascending in _CUTS:
        below = int(share * work.blocks)
        heads = tuple(sorted({round(place * work.group) for place in places} - {0, work.group}))
        if together <= work.blocks and below and work.heads * (work.blocks + len(heads) * below) <= _MOST_PARTS:
            yield Cut(together, below, heads, ascending)


def _parts(work: Work, cut: Cut) -> Iterator[Part]:
    """Yields the parts, from the last blocks of keys of all heads."""
    for end in range(work.blocks, 0, -cut.together):
        blocks = range(max(end - cut.together, 0), end)
        heads = cut.heads if blocks[0] < cut.below else ()
        for first, last in zip((0, *heads), (*heads, work.group), strict=True):
            for head in range(work.heads):
                for block in blocks if cut.ascending else reversed(blocks):
                    yield Part(head, block, first, last)


def _arranged(work: Work, cut: Cut) -> list[list[Part]]:
    """Returns the parts of each block of the grid; each part is taken by the block that is free first."""
    found: list[list[Part]] = [[] for _ in range(work.grid)]
    free = [(0.0, place) for place in range(work.grid)]
    ends: dict[tuple[int, int], float] = {}
    for part in _parts(work, cut):
        now, place = free[0]
        found[place].append(part)
        now = max(now, ends.get(part[:2], 0.0)) + _ITEM_STEPS + _CARRY_STEPS * bool(part.start)
        now += (part.end - part.start) * work.steps[part.block] + _CARRY_STEPS * (part.end < work.group)
        ends[part[:2]] = now
        heapq.heapreplace(free, (now, place))
    return found


def _to_and_fro(work: Work) -> list[list[Part]]:
    """Returns whole items that the blocks of the grid take to and fro, the round that is not full first."""
    found: list[list[Part]] = [[] for _ in range(work.grid)]
    missing = -work.heads * work.blocks % work.grid
    for number in range(work.heads * work.blocks):
        index, place = divmod(number + missing, work.grid)
        block, head = divmod(number, work.heads)
        part = Part(head, work.blocks - 1 - block, 0, work.group)
        found[work.grid - 1 - place if index % 2 else place].append(part)
    return found


def _time(work: Work, places: Places) -> float:
    """Returns an estimate of the time, in steps."""
    place_of = {part: place for place, own in enumerate(places) for part in own}
    begins: dict[tuple[int, int, int], float] = {}
    free = [0.0] * len(places)
    ends: dict[tuple[int, int], float] = {}
    for part in ends_in_order(work, places):
        place, (head, block, start, end) = place_of[part], part
        now = max(free[place], ends.get((head, block), 0.0)) + _CARRY_STEPS * bool(start)
        for index in range(start, end):
            before = begins.get((head, block + 1, index))
            if before is not None:
                now = max(now, before - (work.steps[block] - work.steps[block + 1] - _TURN_STEPS))
            begins[head, block, index] = now
            now += work.steps[block]
        now += _ITEM_STEPS + _CARRY_STEPS * (end < work.group)
        ends[head, block] = free[place] = now
    every = work.heads * work.group * sum(work.steps)
    return max(free) + _MISS_STEPS * _misses(work, begins) * every / work.grid


def _misses(work: Work, begins: dict[tuple[int, int, int], float]) -> float:
    """Returns the share of the steps whose tile is no longer in the cache, of a sample of the tiles."""
    steps, most = np.array(work.steps), max(work.steps)
    visits = []
    for number in range(0, work.heads * work.group * most, _SAMPLED + 1):
        head, index, tile = number // (work.group * most), number // most % work.group, number % most
        for block in np.flatnonzero(steps > most - 1 - tile).tolist():
            # Items end with the last tile.
            visits.append((begins[head, block, index] + tile - (most - work.steps[block]), number))
    visits.sort()
    cached: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for _, number in visits:
        if number in cached:
            cached.move_to_end(number)
            continue
        missed += 1
        cached[number] = None
        if len(cached) > _CACHED_TILES / (_SAMPLED + 1):
            cached.popitem(last=False)
    return missed / max(len(visits), 1)
