"""Sums over the rows of a batch in Triton kernels, in the order of `ChunkContract`.

A program adds a strip of columns over a chunk of 128 rows. The halving tree of a chunk adds eight parts in its last
three steps, each of which is the tree of the 16 rows with the same remainder by 8. All columns of a strip are added
in one register each, so no step depends on the layout of a tensor.

`form` is a `chunk_launch.ChunkForm`.
"""

import triton
import triton.language as tl


@triton.jit
def sum_chunk(step: tl.constexpr, arrays, count, form: tl.constexpr):
    """Returns the sum (W,) over this program's chunk of what `step` returns for each row.

    Args:
        step: A function of `arrays`, the index of a row, the columns (W,), whether the row exists, and `form`. It
            returns float32, and 0 for a row of zeros.
        arrays: What `step` reads.
        count: Number of rows.
        form: The constants.
    """
    STRIP: tl.constexpr = form.strip
    row = tl.program_id(0).to(tl.int64) * 128
    one = tl.zeros((STRIP,), tl.float32)
    pair = one
    four = one
    total = one
    # The parts in the order 0, 4, 2, 6, 1, 5, 3, 7, in which the tree adds neighbours. The loop is not unrolled, as all
    # rows of the chunk at once have no room in registers.
    for i in range(8):
        part = _part(step, arrays, row + ((i & 1) * 4 + (i & 2) + (i >> 2)), count, form)
        two = one + part
        quarter = pair + two
        total = four + quarter
        one = part
        pair = tl.where((i & 1) == 1, two, pair)
        four = tl.where((i & 3) == 3, quarter, four)
    return total


@triton.jit
def columns_of_row(ptr, row, columns, exists, form: tl.constexpr):
    """Returns columns (W,) of a row in float32, 0 where there is none."""
    mask = columns < tl.where(exists, form.columns, 0)
    return tl.load(ptr + row * form.columns + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def number_of_row(ptr, row, exists):
    """Returns the float32 number that an array has for a row, 0 if there is none."""
    return tl.load(ptr + row, mask=exists, other=0.0)


@triton.jit
def strip_of(form: tl.constexpr):
    """Returns the columns (W,) of this program."""
    return tl.program_id(1) * form.strip + tl.arange(0, form.strip)


@triton.jit
def write_strip(out_ptr, start_ptr, total, form: tl.constexpr):
    """Writes the sum of a chunk; if it is the only one, what the sum begins with is added before."""
    columns = strip_of(form)
    mask = columns < form.columns
    if form.single:
        total = _start(start_ptr, columns, mask, form) + total
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * form.columns + columns, total, mask=mask)


@triton.jit
def add_chunks_kernel(sums_ptr, start_ptr, count, out_ptr, form: tl.constexpr):
    """Adds the sums of chunks in ascending order, some of which are read at once."""
    columns = strip_of(form)
    mask = columns < form.columns
    total = _start(start_ptr, columns, mask, form)
    for first in range(0, count, 8):
        for i in tl.static_range(8):
            exists = first + i < count
            at = (tl.zeros((1,), tl.int64) + (first + i)) * form.columns + columns
            value = tl.load(sums_ptr + at, mask=columns < tl.where(exists, form.columns, 0), other=0.0)
            total = tl.where(exists, total + value, total)
    tl.store(out_ptr + columns, total, mask=mask)


@triton.jit
def _start(start_ptr, columns, mask, form: tl.constexpr):
    STRIP: tl.constexpr = form.strip
    if form.has_start:
        start = tl.load(start_ptr + columns, mask=mask, other=0.0)
    else:
        start = tl.zeros((STRIP,), tl.float32)
    return start


@triton.jit
def _part(step: tl.constexpr, arrays, row, count, form: tl.constexpr):
    """Adds every eighth row of a chunk, the first `form.leaves` of 16; the others are zeros."""
    LEAVES: tl.constexpr = form.leaves
    columns = strip_of(form)
    values = ()
    for i in tl.static_range(LEAVES):
        value = step(arrays, row + 8 * i, columns, row + 8 * i < count, form)
        if form.leaves < 16:
            value = value + 0.0  # what the tree adds to it; -0 becomes +0
        values = values + (value,)
    if form.leaves >= 16:
        values = _halved(values, 8)
    if form.leaves >= 8:
        values = _halved(values, 4)
    if form.leaves >= 4:
        values = _halved(values, 2)
    if form.leaves >= 2:
        values = _halved(values, 1)
    return values[0]


@triton.jit
def _halved(values, HALF: tl.constexpr):
    sums = ()
    for i in tl.static_range(HALF):
        sums = sums + (values[i] + values[i + HALF],)
    return sums
