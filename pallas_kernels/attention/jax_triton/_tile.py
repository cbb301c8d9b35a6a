"""The rows and keys of a tile: their places, and what a row sees."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import opaque_index

POSITION_LIMIT = tl.constexpr(1 << 30)
LEAST = tl.constexpr(-3e38)  # of the contract: the maximum before any key


class OptionalArrays(NamedTuple):
    """Pointers to arrays that a launch may have. An absent array is any other pointer.

    Attributes:
        page_table: (B, n) int32.
        alibi_slopes: (B or 1, N) float32.
        sinks: (B or 1, N) floats.
        value_scale: (B or 1, K, V) float32.
        bias: (B or 1, N or 1, T or 1, S or 1) floats.
        mask: The same, bool.
    """

    page_table: Any
    alibi_slopes: Any
    sinks: Any
    value_scale: Any
    bias: Any
    mask: Any


class Sizes(NamedTuple):
    """The sizes of a launch.

    Attributes:
        sequences: B.
        queries: T.
        capacity: Keys that a sequence has room for, S.
        entries: Pages of a sequence, n.
    """

    sequences: Any
    queries: Any
    capacity: Any
    entries: Any


class Arrays(NamedTuple):
    """Pointers to the arrays of a launch, and its sizes.

    Attributes:
        query: (B, T, N, H).
        key: (B, S, K, H), or (P, page, K, H); 8-bit numbers are int8.
        value: The same with V.
        limits: (B, 3) int32.
        optional: Those that may be absent.
        sizes: The sizes.
    """

    query: Any
    key: Any
    value: Any
    limits: Any
    optional: OptionalArrays
    sizes: Sizes


class Limits(NamedTuple):
    """The limits of a sequence, int32.

    Attributes:
        offset: Position of its first query, at least 0.
        count: Its queries; negative if its limits are not valid.
        keys: Its keys, from 0 to the capacity.
    """

    offset: Any
    count: Any
    keys: Any


class Rows(NamedTuple):
    """Rows of a sequence and a key head: a query with one of its heads each.

    Attributes:
        sequence: Their sequence, int64.
        head: Their key head, int32.
        query: (R,) int32, the query of each row.
        query_head: (R,) int32, its query head.
        position: (R,) int32, its position.
        exists: (R,) bool; other rows are not written.
        entry: int64, an index into (B, T, N) as one axis.
        following: (R,) integers, the index of each row relative to `entry`.
        line: int64, an index into (B, K, T * N / K) as one axis.
        in_line: (R,) integers, the index of each row relative to `line`.
    """

    sequence: Any
    head: Any
    query: Any
    query_head: Any
    position: Any
    exists: Any
    entry: Any
    following: Any
    line: Any
    in_line: Any


class Bounds(NamedTuple):
    """The keys that rows see before any mask: (R,) int32, the first and the end; both 0 if they see none."""

    first: Any
    last: Any


class Blocks(NamedTuple):
    """A range of blocks of keys.

    Attributes:
        begin: Index of the first block.
        whole: Index after the last block of the range at `begin` of which the rows see every key, but for a mask.
        end: Index after the last block.
    """

    begin: Any
    whole: Any
    end: Any


class Keys(NamedTuple):
    """Keys of a sequence at neighbouring positions.

    Attributes:
        position: (n,) int32.
        held: (n,) int32, the same within the capacity.
        entry: int64, an index into the first two axes of keys and values as one.
        following: (n,) integers, the index of each key relative to `entry`.
    """

    position: Any
    held: Any
    entry: Any
    following: Any


@triton.jit
def limits_of(arrays: Arrays, sequence):
    """Reads the limits of a sequence."""
    limits = arrays.limits + sequence * 3
    keys = tl.minimum(tl.maximum(tl.load(limits + 2), 0), arrays.sizes.capacity)
    return Limits(tl.maximum(tl.load(limits), 0), tl.load(limits + 1), keys)


@triton.jit
def bounds_of(limits: Limits, rows: Rows, looks, form: tl.constexpr):
    """Returns the bounds of rows; those that do not look see nothing."""
    first, last, some = _bounds_of_query(limits, rows.query, form)
    some = some & looks
    return Bounds(tl.where(some, first, 0), tl.where(some, last, 0))


@triton.jit
def _bounds_of_query(limits: Limits, query, form: tl.constexpr):
    """Returns the first key of queries, the end of their keys, and whether they see any."""
    position = limits.offset + query
    first = position * 0
    last = first + limits.keys
    if form.causal:
        last = tl.minimum(last, position + 1)
    if form.before is not None:
        first = tl.maximum(first, position - form.before)
        last = tl.minimum(last, position + (form.after + 1))
    return first, last, (query < limits.count) & (last > first)


@triton.jit
def rows_at(
    arrays: Arrays, limits: Limits, sequence, head, start, COUNT: tl.constexpr, WITHIN: tl.constexpr, form: tl.constexpr
):
    """Returns rows of a sequence and a key head from `start` on, a multiple of `COUNT`, query-major.

    Rows after the last are read as the last one. There are none if `WITHIN`, where what a loop adds to pointers is one
    number.
    """
    offsets = tl.arange(0, COUNT)
    index = start + offsets
    total = arrays.sizes.queries * form.group
    held = index
    if not WITHIN:
        held = tl.minimum(index, total - 1)
    query, in_group = held // form.group, held % form.group
    line, in_line = (sequence * form.heads + head) * total, held
    if WITHIN:
        line, in_line = tl.multiple_of(line + opaque_index(start), 16), offsets
    if WITHIN and COUNT % form.group == 0:
        entry = (
            sequence * arrays.sizes.queries + opaque_index(start) // form.group
        ) * form.query_heads + head * form.group
        following = offsets // form.group * form.query_heads + offsets % form.group
    else:
        entry = sequence * arrays.sizes.queries * form.query_heads + head * form.group
        following = query.to(tl.int64) * form.query_heads + in_group
    query_head = head * form.group + in_group
    return Rows(
        sequence=sequence,
        head=head,
        query=query,
        query_head=query_head,
        position=limits.offset + query,
        exists=index < total,
        entry=entry,
        following=following,
        line=line,
        in_line=in_line,
    )


@triton.jit
def keys_at(arrays: Arrays, sequence, start, COUNT: tl.constexpr, WITHIN: tl.constexpr, form: tl.constexpr):
    """Returns the keys from the position `start` on. Keys after the last are read as the last one.

    All are within the capacity if they are known to be (`WITHIN`). What a loop adds to pointers is then one number.
    """
    offsets = tl.arange(0, COUNT)
    position = start + offsets
    held = position
    if not WITHIN:
        held = tl.minimum(position, arrays.sizes.capacity - 1)
    if form.page is None:
        entry = sequence * arrays.sizes.capacity + opaque_index(start)
        following = held - start
        if WITHIN:
            following = offsets
    else:
        table = arrays.optional.page_table + sequence * arrays.sizes.entries
        if form.page % COUNT == 0:
            entry = tl.load(table + start // form.page).to(tl.int64) * form.page + start % form.page
            following = offsets
        else:
            entry = sequence * 0
            following = tl.load(table + held // form.page).to(tl.int64) * form.page + held % form.page
    return Keys(position, held, entry, following)


@triton.jit
def blocks_seen(arrays: Arrays, limits: Limits, start, ROWS: tl.constexpr, BLOCK: tl.constexpr, form: tl.constexpr):
    """Returns the range of key blocks with all keys that any row sees.

    The rows are those from `start` on, as for `rows_at`. The bounds of later queries are not smaller, and if a query
    sees keys, so do those before it: the ends are known from three queries, without an exchange between threads.
    """
    earliest = start // form.group
    latest = tl.minimum(start + (ROWS - 1), arrays.sizes.queries * form.group - 1) // form.group
    first, last, some = _bounds_of_query(limits, earliest, form)
    latest_first, _, every = _bounds_of_query(limits, latest, form)
    seeing = tl.minimum(latest, limits.count - 1)
    if form.before is not None:
        seeing = tl.minimum(seeing, limits.keys + (form.before - 1) - limits.offset)
    _, highest, _ = _bounds_of_query(limits, seeing, form)
    begin = tl.where(some, first, 0) // BLOCK
    end = (tl.where(some, highest, 0) + (BLOCK - 1)) // BLOCK
    whole = tl.where(every & (latest_first <= begin * BLOCK), last // BLOCK, 0)
    whole = tl.minimum(tl.maximum(whole, begin), end)
    # The compiler would move branches of a loop over blocks if it saw that a range begins with the first one.
    return Blocks(opaque_index(begin), opaque_index(whole), opaque_index(end))


@triton.jit
def blocks_of_split(blocks: Blocks, split, form: tl.constexpr):
    """Returns those of the blocks that are in a split."""
    BLOCKS: tl.constexpr = form.split // form.key_block
    begin, end = tl.maximum(blocks.begin, split * BLOCKS), tl.minimum(blocks.end, (split + 1) * BLOCKS)
    return Blocks(begin, blocks.whole, end)
