"""The order of the parts of the gradients of attention: each part once, no standstill, and whole items otherwise."""

from collections import Counter
from typing import Final

import pytest

from pallas_kernels.attention.schedule.gradient_order import GradientOrder, Part, Work, ends_in_order, gradient_order
from pallas_kernels.attention.schedule.hopper import gradient_schedule
from pallas_kernels.parts.hopper import residency

SMS: Final = 132


def work(heads: int, group: int, blocks: int, tiles: int, grid: int = SMS) -> Work:
    """Work under a causal mask, with `tiles` tiles of queries for each block of keys."""
    return Work(heads, group, tuple(tiles * (blocks - block) for block in range(blocks)), grid)


WORKS: Final = {
    "4x4096, heads of 128": work(32, 4, 32, 2),
    "2x16384, heads of 128": work(8, 4, 128, 2),
    "1x8192, heads of 128": work(8, 4, 64, 2),
    "4x4096, heads of 64": work(32, 4, 32, 1),
    "2x4096, 7 query heads for each key head": work(8, 7, 32, 2),
}


def parts_of(own: Work, order: GradientOrder) -> list[list[Part]]:
    return [[own.part(code) for code in codes] for codes in order.codes]


@pytest.mark.parametrize("name", WORKS)
def test_each_query_head_of_each_block_of_keys_is_taken_once(name: str) -> None:
    own = WORKS[name]
    order = gradient_order(own)
    assert order is not None
    places = parts_of(own, order)
    assert len(places) == own.grid
    taken = Counter(
        (part.head, part.block, i) for place in places for part in place for i in range(part.start, part.end)
    )
    assert taken == Counter(
        (head, block, i) for head in range(own.heads) for block in range(own.blocks) for i in range(own.group)
    )
    cut = {part.block for place in places for part in place if part.end - part.start < own.group}
    assert all(block < order.carried for block in cut)
    table = order.table
    for index, place in enumerate(places):
        assert table[1 : 1 + table[0, index], index].tolist() == [own.code(part) for part in place]


@pytest.mark.parametrize("name", WORKS)
def test_the_grid_never_stands_still(name: str) -> None:
    """Simulates the grid with blocks that make no step before those that they wait for, in the worst order."""
    own = WORKS[name]
    order = gradient_order(own)
    assert order is not None
    places, at, done = parts_of(own, order), [0] * own.grid, Counter[tuple[int, int]]()
    left = sum(map(len, places))
    while left:
        before = left
        for index, place in enumerate(places):
            while at[index] < len(place):
                part = place[at[index]]
                own_heads, later = done[part.head, part.block], done[part.head, part.block + 1]
                # The sums of the next block of keys come first, and the same item's part before this one.
                if own_heads < part.start or (part.block + 1 < own.blocks and later < part.end):
                    break
                done[part.head, part.block] = part.end
                at[index] += 1
                left -= 1
        assert left < before


def test_a_standstill_is_found() -> None:
    """The control: a block of the grid that takes the first block of keys before the last one."""
    own = work(1, 2, 2, 1, grid=1)
    last, first = Part(0, 1, 0, 2), Part(0, 0, 0, 2)
    assert ends_in_order(own, [[last, first]]) == [last, first]
    with pytest.raises(ValueError, match="cycle"):
        ends_in_order(own, [[first, last]])


@pytest.mark.parametrize(
    "own",
    [work(32, 1, 32, 2), work(1000, 4, 32, 2), work(4, 32, 16, 2), work(64, 4, 8, 2), work(16, 2, 32, 2)],
    ids=["one head", "many items", "many heads", "short sequences", "no gain"],
)
def test_what_keeps_whole_items(own: Work) -> None:
    assert gradient_order(own) is None


@pytest.mark.parametrize(("count", "blocks"), [(114, 114), (78, 78), (144, SMS), (None, SMS)])
def test_the_grid_has_no_more_blocks_than_run_at_once(
    count: int | None, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H100 PCIe and H20 have fewer multiprocessors than an H100 SXM: a block would wait for one that has not begun."""
    monkeypatch.setattr(residency, "multiprocessors", lambda: count)
    assert residency.resident_blocks() == blocks
    assert gradient_schedule(128, sees_all=False, blocks=residency.resident_blocks()).blocks == blocks
