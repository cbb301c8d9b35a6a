"""Rows in Triton kernels: reading and writing their columns, and reductions in the order of `RowContract`.

A program has one or several rows. A row is read in blocks of the contract's lanes. Each lane adds its columns in order;
then neighbouring lanes are added by the contract's two trees. Every step of a tree adds two numbers, so the order in
which Triton reduces an axis of two elements does not matter.

`form` is a `row_launch.RowForm`. If it says so, the blocks of a row are held in registers, in a tuple that grows in a
loop that is unrolled. Otherwise the tuple is empty, and every pass over the row reads it again, some blocks at once.
A pass is written for both, as a loop over pieces of a row and an unrolled one over the blocks of a piece:

    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        xs = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            ... xs[i] is the block first + i
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """The rows of a program.

    Attributes:
        index: (R, 1) int64.
        exists: (R, 1) bool; the last program may have fewer rows.
    """

    index: Any
    exists: Any


@triton.jit
def rows_of(count, form: tl.constexpr):
    """Returns the rows of this program, of `count` in all."""
    index = tl.program_id(0) * form.rows + tl.arange(0, form.rows)
    exists = index >= 0
    if form.rows > 1:
        exists = index < count
    return Rows(index.to(tl.int64)[:, None], exists[:, None])


@triton.jit
def starts(ptr, rows: Rows, form: tl.constexpr):
    """Returns pointers (R, 1) to the first column of each row."""
    return ptr + rows.index * form.columns


@triton.jit
def columns_of(block, form: tl.constexpr):
    """Returns the columns (1, L) of a block that this program has."""
    start = block * form.stride
    if form.parts > 1:
        start += tl.program_id(1) * form.lanes
    return (start + tl.arange(0, form.lanes))[None, :]


@triton.jit
def inside(rows: Rows, block, form: tl.constexpr):
    """Returns which columns of a block exist, (R, L) or (1, L)."""
    mask = columns_of(block, form) < form.columns
    if form.rows > 1:
        mask = mask & rows.exists
    return mask


@triton.jit
def read(row_starts, rows: Rows, block, form: tl.constexpr):
    """Returns a block of the rows (R, L), 0 where there is none."""
    return tl.load(row_starts + columns_of(block, form), mask=inside(rows, block, form), other=0.0)


@triton.jit
def write(ptr, rows: Rows, block, value, form: tl.constexpr):
    """Writes a block of the rows of a result, rounded to its dtype."""
    pointers = starts(ptr, rows, form) + columns_of(block, form)
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=inside(rows, block, form))


@triton.jit
def read_vector(ptr, block, form: tl.constexpr):
    """Returns a block (1, L) of a vector that all rows share, 0 where there is none."""
    columns = columns_of(block, form)
    return tl.load(ptr + columns, mask=columns < form.columns, other=0.0)


@triton.jit
def preloaded(ptr, PRESENT: tl.constexpr, form: tl.constexpr):
    """Returns all blocks of a vector that is present, if it is read before the rows are added, or else nothing."""
    BLOCKS: tl.constexpr = form.blocks
    blocks = ()
    if form.preload and PRESENT:
        for block in tl.static_range(BLOCKS):
            blocks = blocks + (read_vector(ptr, block, form),)
    return blocks


@triton.jit
def vector(kept, ptr, block, form: tl.constexpr):
    """Returns a block (1, L) of a vector in float32: a preloaded one, or read from memory."""
    if form.preload:
        x = kept[block]
    else:
        x = read_vector(ptr, block, form)
    return x.to(tl.float32)


@triton.jit
def number(ptr, rows: Rows):
    """Returns the number (R, 1) that an array has for each row."""
    return tl.load(ptr + rows.index, mask=rows.exists, other=0)


@triton.jit
def put(ptr, rows: Rows, value):
    """Writes a number (R, 1) for each row."""
    tl.store(ptr + rows.index, value, mask=rows.exists)


@triton.jit
def held(row_starts, rows: Rows, form: tl.constexpr):
    """Returns all blocks of the rows if they are held, or else nothing."""
    BLOCKS: tl.constexpr = form.blocks
    blocks = ()
    if form.held:
        for block in tl.static_range(BLOCKS):
            blocks = blocks + (read(row_starts, rows, block, form),)
    return blocks


@triton.jit
def piece(kept, row_starts, rows: Rows, first, form: tl.constexpr):
    """Returns the blocks of a piece of the rows: the held ones, or read from memory."""
    PIECE: tl.constexpr = form.piece
    if form.held:
        blocks = kept
    else:
        blocks = ()
        for i in tl.static_range(PIECE):
            blocks = blocks + (read(row_starts, rows, first + i, form),)
    return blocks


@triton.jit
def totals_of(kept, x, residual, rows: Rows, first, HAS_RESIDUAL: tl.constexpr, form: tl.constexpr):
    """Returns the blocks of a piece of x + residual, both of them rounded to its dtype, or of x."""
    PIECE: tl.constexpr = form.piece
    totals = piece(kept, x, rows, first, form)
    if HAS_RESIDUAL:
        xs = totals
        totals = ()
        for i in tl.static_range(PIECE):
            added = read(residual, rows, first + i, form).to(xs[i].dtype)
            wide = xs[i].to(tl.float32) + added.to(tl.float32)
            totals = totals + (wide.to(xs[i].dtype),)
    return totals


@triton.jit
def zeros(dtype: tl.constexpr, form: tl.constexpr):
    """Returns lanes (R, L) of zeros."""
    ROWS: tl.constexpr = form.rows
    LANES: tl.constexpr = form.lanes
    return tl.zeros((ROWS, LANES), dtype)


@triton.jit
def of_columns(x, block, form: tl.constexpr):
    """Returns a block with 0 in columns that do not exist."""
    if form.columns < form.stride * form.blocks:
        x = tl.where(columns_of(block, form) < form.columns, x, 0.0)
    return x


@triton.jit
def add_lanes(lanes, form: tl.constexpr):
    """Adds lanes (R, L) to (R, 1): groups of 128 neighbours by a halving tree, then the groups by another."""
    return add_groups(group_sums(lanes, form), form.rows, form.lanes // 128)


@triton.jit
def group_sums(lanes, form: tl.constexpr):
    """Adds lanes (R, L) to (R * L / 128, 1), the sums of groups of 128 neighbours."""
    COUNT: tl.constexpr = form.rows * (form.lanes // 128)
    x = _halved(lanes, COUNT, 128)
    x = _halved(x, COUNT, 64)
    x = _halved(x, COUNT, 32)
    x = _halved(x, COUNT, 16)
    x = _halved(x, COUNT, 8)
    x = _halved(x, COUNT, 4)
    return _halved(x, COUNT, 2)


@triton.jit
def add_groups(x, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Adds the sums of groups to (ROWS, 1)."""
    if GROUPS >= 64:
        x = _halved(x, ROWS, 64)
    if GROUPS >= 32:
        x = _halved(x, ROWS, 32)
    if GROUPS >= 16:
        x = _halved(x, ROWS, 16)
    if GROUPS >= 8:
        x = _halved(x, ROWS, 8)
    if GROUPS >= 4:
        x = _halved(x, ROWS, 4)
    if GROUPS >= 2:
        x = _halved(x, ROWS, 2)
    return _without_layout(tl.reshape(x, (ROWS, 1)), ROWS)


@triton.jit
def _without_layout(x, ROWS: tl.constexpr):
    """Returns the sums (R, 1) of rows in a layout that Triton is free to choose.

    The layout of a tree's end, where each thread holds all columns of a row, would else be propagated to the columns
    that the sum is subtracted from. A scalar has no layout, and none is propagated through a gather.
    """
    if ROWS == 1:
        free = tl.full((1, 1), tl.sum(tl.sum(x, axis=1), axis=0), tl.float32)
    else:
        free = tl.gather(x, tl.zeros((ROWS, 1), tl.int32), axis=1)
    return free


@triton.jit
def quotient(x, divisor):
    """Returns x / divisor of float32 numbers (R, 1), rounded correctly."""
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def reciprocal(x):
    """Returns 1 / x of float32 numbers (R, 1), rounded correctly."""
    return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def reciprocal_root(total, EPS: tl.constexpr, form: tl.constexpr):
    """Returns 1 / sqrt(total / C + EPS), each step rounded correctly."""
    return reciprocal(tl.sqrt_rn(quotient(total, form.columns) + EPS))


@triton.jit
def _halved(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Adds the second half of each of `COUNT` groups of `SIZE` numbers to the first half."""
    return tl.sum(tl.reshape(x, (COUNT, 2, SIZE // 2)), axis=1)
