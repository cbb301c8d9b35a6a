"""In which order the blocks of the grid take the gradients of attention under a causal mask.

An item is a block of keys of a key head, with the tiles of queries of all query heads that share the keys. Sums over
blocks of keys begin with the last block, whose item is the shortest one, so the longest items come last: blocks of the
grid end at different times, or wait for one another. Here the longest items are cut into parts of some query heads. The
block of the grid that takes the next part goes on with the gradients of keys and values, so no bit depends on it.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

HEAD_BITS: Final = 4
"""Bits of a number of a query head in a part's code."""

# In steps: of a tile of queries of one head with a block of keys.
_ITEM_STEPS: Final = 2.5
_CARRY_STEPS: Final = 1.7
_TURN_STEPS: Final = 1  # from one block's sums to the next one's
_MOST_PARTS: Final = 8192  # more items than these leave less to gain, and take long to arrange
_GAIN: Final = 0.995
_TOGETHER: Final = (1, 4, 8)
_SHARES: Final = (0.25, 0.375)
_CUTS: Final = ((0.75,), (0.5, 0.75))


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


@dataclass(frozen=True)
class GradientOrder:
    """The parts that each block of the grid takes, one after the other.

    A part waits only for parts before it in one order of all parts, in which each block of the grid takes its own, so
    the grid cannot stand still.

    Attributes:
        parts: The codes of the parts of each block of the grid.
        carried: Blocks of keys of each head, from the first, that are cut.
    """

    parts: tuple[tuple[int, ...], ...]
    carried: int

    @property
    def table(self) -> np.ndarray:
        """How many parts each block of the grid has, and their codes (1 + most parts, blocks of the grid)."""
        table = np.zeros((1 + max(len(own) for own in self.parts), len(self.parts)), np.int32)
        for place, own in enumerate(self.parts):
            table[0, place] = len(own)
            table[1 : 1 + len(own), place] = own
        return table


@lru_cache(maxsize=256)
def gradient_order(work: Work) -> GradientOrder | None:
    """Returns an order with which the work takes less time than item by item, or None.

    Args:
        work: The work.
    """
    if not 1 < work.group <= 1 << HEAD_BITS or work.heads * work.blocks > _MOST_PARTS:
        return None
    shortest, found = _GAIN * _to_and_fro(work), None
    for cuts in _CUTS:
        edges = (0, *(round(cut * work.group) for cut in cuts), work.group)
        if len(set(edges)) < len(edges):
            continue
        for carried in {int(share * work.blocks) for share in _SHARES} - {0}:
            if work.heads * (work.blocks + len(cuts) * carried) > _MOST_PARTS:
                continue
            for together in _TOGETHER:
                time, parts = _arranged(work, list(_interleaved(work, carried, edges, together)))
                if time < shortest:
                    shortest, found = time, GradientOrder(parts, carried)
    return found


def _interleaved(work: Work, carried: int, edges: Sequence[int], together: int) -> Iterator[Part]:
    """Yields the parts: whole blocks, then the first parts of the others, then their next ones, by descending block."""
    of_head = [(block, 0, work.group) for block in range(work.blocks - 1, carried - 1, -1)]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        of_head += [(block, start, end) for block in range(carried - 1, -1, -1)]
    for first in range(0, len(of_head), together):
        for head in range(work.heads):
            for own in of_head[first : first + together]:
                yield Part(head, *own)


class _Clock:
    """When parts begin and end, in steps."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._begins: dict[tuple[int, int, int], float] = {}
        self._ends: dict[tuple[int, int], float] = {}

    def end(self, part: Part, free: float) -> float:
        """Returns when a part ends that a block of the grid takes once it is free.

        It does not begin before the part of the next block of keys, which adds to the gradients of queries before it.
        """
        head, block, start, end = part
        begin = free
        if (head, block + 1, start) in self._begins:
            lead = self._work.steps[block] - self._work.steps[block + 1] - _TURN_STEPS
            begin = max(free, self._begins[head, block + 1, start] - lead)
        if start:
            begin = max(begin, self._ends[head, block])
        at = begin + _ITEM_STEPS + (_CARRY_STEPS if start else 0.0)
        for own in range(start, end):
            self._begins[head, block, own] = at - _ITEM_STEPS
            at += self._work.steps[block]
        self._ends[head, block] = at = at + (_CARRY_STEPS if end < self._work.group else 0.0)
        return at


def _arranged(work: Work, parts: Sequence[Part]) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Returns the time of parts of which each is taken by the block of the grid that is free first, and who has which."""
    clock, found = _Clock(work), [[] for _ in range(work.grid)]  # type: ignore[var-annotated]
    free = [(0.0, place) for place in range(work.grid)]
    for part in parts:
        now, place = free[0]
        found[place].append(work.code(part))
        heapq.heapreplace(free, (clock.end(part, now), place))
    return max(free)[0], tuple(tuple(own) for own in found)


def _to_and_fro(work: Work) -> float:
    """Returns the time of whole items that the blocks of the grid take to and fro, the round that is not full first."""
    clock, free = _Clock(work), [0.0] * work.grid
    items, grid = work.heads * work.blocks, work.grid
    missing = -items % grid
    for number in range(items):
        index, place = divmod(number + missing, grid)
        place = grid - 1 - place if index % 2 else place
        part = Part(number % work.heads, work.blocks - 1 - number // work.heads, 0, work.group)
        free[place] = clock.end(part, free[place])
    return max(free)
