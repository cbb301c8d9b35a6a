"""Bodies of the Triton kernels of the layout of expert rows: a program compares ITEMS items with all others.

All sizes are constants of the machine code: with the number of tokens as an argument the loops took a seventh longer.
"""

from typing import Final

import triton
import triton.language as tl

from pallas_kernels.parts.no_row import NO_ROW, WRONG

_NO_ROW: Final = tl.constexpr(NO_ROW)
_WRONG: Final = tl.constexpr(WRONG)


@triton.jit
def sort_kernel(
    number_ptr,
    offset_ptr,
    expert_ptr,
    count_ptr,
    fit_ptr,
    places_ptr,
    rows_ptr,
    tokens_ptr,
    GIVEN: tl.constexpr,
    ALLOCATED: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    TOPK: tl.constexpr,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Ranks places by expert and then by place; other programs count the rows of ITEMS experts each."""
    EXPERTS: tl.constexpr = END - FIRST
    LONGEST: tl.constexpr = GIVEN if GIVEN > ALLOCATED else ALLOCATED
    OF_PLACES: tl.constexpr = (LONGEST + ITEMS - 1) // ITEMS
    block = tl.program_id(0)
    if block < OF_PLACES:
        place = block * ITEMS + tl.arange(0, ITEMS)
        mine = _experts(number_ptr, place, GIVEN, FIRST, END)
        key = mine * LONGEST + place  # ties are broken by place
        before = tl.zeros((ITEMS, CHUNK), tl.int32)
        used = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, GIVEN, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = _experts(number_ptr, other, GIVEN, FIRST, END)
            # Padding sorts last.
            before += ((theirs * LONGEST + other)[None, :] < key[:, None]).to(tl.int32)
            used += (theirs < EXPERTS).to(tl.int32)
        row = tl.sum(before, axis=1)
        row = tl.where(place < GIVEN, row, place)  # padding was not counted
        there = (place < LONGEST) & (row < ALLOCATED)
        fits = tl.sum(used, axis=0) <= ALLOCATED
        tl.store(offset_ptr + row, tl.where(mine < EXPERTS, place, _NO_ROW), mask=there)
        tl.store(expert_ptr + row, mine, mask=there)
        tl.store(places_ptr + row, place, mask=place < GIVEN)
        tl.store(rows_ptr + place, tl.where((mine < EXPERTS) & (row < ALLOCATED), row, _NO_ROW), mask=place < GIVEN)
        token = tl.where(mine < EXPERTS, place // TOPK, _NO_ROW)
        tl.store(tokens_ptr + row, tl.where(fits, token, _WRONG), mask=there)
        if block == 0:
            tl.store(fit_ptr, fits.to(tl.int32))
    else:
        _count(number_ptr, count_ptr, block - OF_PLACES, GIVEN, FIRST, END, ITEMS, CHUNK)


@triton.jit
def spread_kernel(
    x_ptr,
    number_ptr,
    out_ptr,
    count_ptr,
    rows_ptr,
    GIVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Ranks a place by expert and then by place, and copies its token to that row; other programs count as above."""
    block = tl.program_id(0)
    if block < GIVEN:
        mine = _experts(number_ptr, block, GIVEN, 0, EXPERTS)
        key = mine * GIVEN + block  # ties are broken by place
        before = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, GIVEN, CHUNK):
            other = start + tl.arange(0, CHUNK)
            before += (_experts(number_ptr, other, GIVEN, 0, EXPERTS) * GIVEN + other < key).to(tl.int32)
        row = tl.sum(before, axis=0)
        used = mine < EXPERTS
        tl.store(rows_ptr + block, tl.where(used, row, _NO_ROW))
        x_ptr += (block // TOPK).to(tl.int64) * COLUMNS
        out_ptr += row.to(tl.int64) * COLUMNS
        piece = tl.arange(0, GROUP)[:, None]
        column = tl.arange(0, PIECE)[None, :]
        for first in range(0, COLUMNS, GROUP * PIECE):
            inside = first + piece * PIECE < COLUMNS
            offsets = first + piece * PIECE + column
            copied = tl.load(x_ptr + offsets, mask=inside, other=0)
            tl.store(out_ptr + offsets, tl.where(used, copied, tl.zeros_like(copied)), mask=inside)
    else:
        _count(number_ptr, count_ptr, block - GIVEN, GIVEN, 0, EXPERTS, ITEMS, CHUNK)


@triton.jit
def _count(
    number_ptr,
    count_ptr,
    block,
    GIVEN: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Counts the rows of ITEMS experts."""
    expert = block * ITEMS + tl.arange(0, ITEMS)
    same = tl.zeros((ITEMS, CHUNK), tl.int32)
    for start in range(0, GIVEN, CHUNK):
        theirs = _experts(number_ptr, start + tl.arange(0, CHUNK), GIVEN, FIRST, END)
        same += (theirs[None, :] == expert[:, None]).to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(same, axis=1), mask=expert < END - FIRST)


@triton.jit
def count_kernel(
    count_ptr,
    expert_ptr,
    fit_ptr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Counts the experts whose rows end at or before each row."""
    expert = tl.arange(0, SLOTS)
    read = tl.load(count_ptr + expert, mask=expert < EXPERTS, other=0)
    ends = tl.cumsum(tl.where((read >= 0) & (read <= ROWS), read, ROWS + 1), axis=0)
    fits = tl.max(ends, axis=0) <= ROWS
    row = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    passed = (expert < EXPERTS)[None, :] & (tl.where(fits, ends, 0)[None, :] <= row[:, None])
    tl.store(expert_ptr + row, tl.sum(passed.to(tl.int32), axis=1), mask=row < ROWS)
    if tl.program_id(0) == 0:
        tl.store(fit_ptr, fits.to(tl.int32))


@triton.jit
def place_kernel(
    offset_ptr, row_ptr, GIVEN: tl.constexpr, PLACES: tl.constexpr, ITEMS: tl.constexpr, CHUNK: tl.constexpr
):
    """Searches all offsets for the rows of each place, and for offsets after the last place."""
    place = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.full((ITEMS, CHUNK), _NO_ROW, tl.int32)
    number = tl.zeros((ITEMS, CHUNK), tl.int32)
    outside = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, GIVEN, CHUNK):
        other = start + tl.arange(0, CHUNK)
        read = tl.load(offset_ptr + other, mask=other < GIVEN, other=_NO_ROW)
        mine = read[None, :] == place[:, None]
        row = tl.maximum(row, tl.where(mine, other[None, :], _NO_ROW))
        number += mine.to(tl.int32)
        outside = tl.maximum(outside, (read >= PLACES).to(tl.int32))
    wrong = (tl.sum(number, axis=1) > 1) | (tl.max(outside, axis=0) > 0)
    found = tl.where(wrong, _WRONG, tl.max(row, axis=1))
    tl.store(row_ptr + place, found, mask=place < PLACES)


@triton.jit
def _experts(number_ptr, place, GIVEN: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """Returns the experts of places, counted from FIRST; END - FIRST for others and for places that do not exist."""
    number = tl.load(number_ptr + place, mask=place < GIVEN, other=END)
    return tl.where((number >= FIRST) & (number < END), number - FIRST, END - FIRST)
