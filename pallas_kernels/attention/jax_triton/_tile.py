"""The rows and keys of a tile: their places, and what a row sees."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

POSITION_LIMIT = tl.constexpr(1 << 30)
LEAST = tl.constexpr(-3e38)  # of the contract: the maximum before any key


class Arrays(NamedTuple):
    """Pointers to the arrays of a launch, and its sizes. An absent array is any other pointer.

    Attributes:
        query: (B, T, N, H).
        key: (B, S, K, H), or (P, page, K, H); 8-bit numbers are int8.
        value: The same with V.
        limits: (B, 3) int32.
        page_table: (B, n) int32.
        alibi_slopes: (B or 1, N) float32.
        sinks: (B or 1, N) floats.
        value_scale: (B or 1, K, V) float32.
        bias: (B or 1, N or 1, T or 1, S or 1) floats.
        mask: The same, bool.
        sequences: B.
        queries: T.
        capacity: Keys that a sequence has room for, S.
        entries: Pages of a sequence, n.
    """

    query: Any
    key: Any
    value: Any
    limits: Any
    page_table: Any
    alibi_slopes: Any
    sinks: Any
    value_scale: Any
    bias: Any
    mask: Any
    sequences: Any
    queries: Any
    capacity: Any
    entries: Any


class Rows(NamedTuple):
    """Rows of a sequence and a key head: a query with one of its heads each.

    Attributes:
        sequence: Their sequence, int64.
        head: Their key head, int32.
        query: (R,) int32, the query of each row.
        query_head: (R,) int32, its query head.
        position: (R,) int32, its position.
        first: (R,) int32, the first key that it sees.
        last: (R,) int32, the end of the keys that it sees; both 0 if it sees none.
        exists: (R,) bool; other rows are not written.
        valid: Whether the limits of the sequence are valid.
    """

    sequence: Any
    head: Any
    query: Any
    query_head: Any
    position: Any
    first: Any
    last: Any
    exists: Any
    valid: Any


class Keys(NamedTuple):
    """Keys of a sequence at neighbouring positions.

    Attributes:
        position: (n,) int32.
        held: (n,) int32, the same within the capacity.
        entry: (n,) int64, or one number and n following: indices into the first two axes of keys and values as one.
    """

    position: Any
    held: Any
    entry: Any


@triton.jit
def rows_of(arrays: Arrays, sequence, head, query, query_head, exists, looks, form: tl.constexpr):
    """Returns rows with what they see before any mask, which is nothing unless they are to look."""
    limits = arrays.limits + sequence * 3
    offset = tl.maximum(tl.load(limits), 0)
    count = tl.load(limits + 1)
    keys = tl.minimum(tl.maximum(tl.load(limits + 2), 0), arrays.capacity)
    position = offset + query
    first = tl.zeros_like(position)
    last = first + keys
    if form.causal:
        last = tl.minimum(last, position + 1)
    if form.before is not None:
        first = tl.maximum(first, position - form.before)
        last = tl.minimum(last, position + (form.after + 1))
    some = (query < count) & (last > first) & looks
    return Rows(
        sequence,
        head,
        query,
        query_head,
        position,
        tl.where(some, first, 0),
        tl.where(some, last, 0),
        exists,
        count >= 0,
    )


@triton.jit
def rows_at(arrays: Arrays, sequence, head, start, COUNT: tl.constexpr, REPEATS: tl.constexpr, form: tl.constexpr):
    """Returns rows of a sequence and a key head from `start` on, query-major.

    Rows after the last one are read as the last one, and see its keys (`REPEATS`) or nothing.
    """
    index = start + tl.arange(0, COUNT)
    total = arrays.queries * form.group
    held = tl.minimum(index, total - 1)
    query_head = head * form.group + held % form.group
    exists = index < total
    looks = exists | REPEATS
    return rows_of(arrays, sequence, head, held // form.group, query_head, exists, looks, form)


@triton.jit
def keys_at(arrays: Arrays, sequence, start, COUNT: tl.constexpr, form: tl.constexpr):
    """Returns the keys from the position `start` on. Keys after the last are read as the last one."""
    offsets = tl.arange(0, COUNT)
    position = start + offsets
    held = tl.minimum(position, arrays.capacity - 1)
    if form.page is None:
        entry = sequence * arrays.capacity + held
    else:
        table = arrays.page_table + sequence * arrays.entries
        if form.page % COUNT == 0:
            page = tl.load(table + start // form.page).to(tl.int64)
            entry = page * form.page + (start % form.page + offsets)
        else:
            pages = tl.load(table + held // form.page).to(tl.int64)
            entry = pages * form.page + held % form.page
    return Keys(position, held, entry)


@triton.jit
def blocks_seen(rows: Rows, BLOCK: tl.constexpr):
    """Returns the range of key blocks with all keys that any row sees, and the end of the first that all rows see."""
    some = rows.last > rows.first
    lowest = tl.min(tl.where(some, rows.first, POSITION_LIMIT), 0)
    highest = tl.max(tl.where(some, rows.last, 0), 0)
    begin = lowest // BLOCK
    end = (highest + (BLOCK - 1)) // BLOCK
    whole = tl.where(tl.max(rows.first, 0) <= begin * BLOCK, tl.min(rows.last, 0) // BLOCK, 0)
    return begin, tl.minimum(tl.maximum(whole, begin), end), end
