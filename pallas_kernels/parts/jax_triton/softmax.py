"""The maximum of a row and the sum of its exponentials in Triton kernels, in the order of `RowContract`."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import exponential
from pallas_kernels.parts.jax_triton.parts_of_rows import maximum_of_parts, put_groups, put_part
from pallas_kernels.parts.jax_triton.rows import (
    Rows,
    add_lanes,
    columns_of,
    held,
    of_columns,
    piece,
    rows_of,
    starts,
    zeros,
)


@triton.jit
def maximum_of(kept, x, rows: Rows, form: tl.constexpr):
    """Returns the maximum (R, 1) of rows; any number where a row holds a nan, which its consumers encounter anyway."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    lanes = zeros(tl.float32, form) - float("inf")
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        xs = piece(kept, x, rows, first, form)
        for i in tl.static_range(PIECE):
            value = xs[i].to(tl.float32)
            if form.columns < form.stride * form.blocks:
                value = tl.where(columns_of(first + i, form) < form.columns, value, float("-inf"))
            lanes = tl.maximum(lanes, value)
    return tl.max(lanes, axis=1, keep_dims=True)


@triton.jit
def exponentials(kept, m, EXACT: tl.constexpr, form: tl.constexpr, POSITIVE: tl.constexpr = False):
    """Returns exp(x - m) of all blocks of rows if they are held, or else nothing.

    `POSITIVE` says that x - m may be greater than 0, in rows with an infinity; the result is then infinity.
    """
    powers = ()
    if form.held:
        powers = _exponentials(kept, 0, m, EXACT, form, POSITIVE)
    return powers


@triton.jit
def powers_of(powers, x, rows: Rows, first, m, EXACT: tl.constexpr, form: tl.constexpr, POSITIVE: tl.constexpr = False):
    """Returns exp(x - m) of a piece of the rows, 0 in columns that do not exist: the held one, or from memory."""
    if form.held:
        found = powers
    else:
        found = _exponentials(piece((), x, rows, first, form), first, m, EXACT, form, POSITIVE)
    return found


@triton.jit
def sum_of_exponentials(
    powers, x, rows: Rows, m, EXACT: tl.constexpr, form: tl.constexpr, POSITIVE: tl.constexpr = False
):
    """Returns the sum (R, 1) of exp(x - m)."""
    return add_lanes(lanes_of_exponentials(powers, x, rows, m, EXACT, form, POSITIVE), form)


@triton.jit
def lanes_of_exponentials(
    powers, x, rows: Rows, m, EXACT: tl.constexpr, form: tl.constexpr, POSITIVE: tl.constexpr = False
):
    """Returns the sums (R, L) of exp(x - m) of each lane."""
    BLOCKS: tl.constexpr = form.blocks
    PIECE: tl.constexpr = form.piece
    lanes = zeros(tl.float32, form)
    for first in (tl.static_range if form.held else tl.range)(0, BLOCKS, PIECE):
        found = powers_of(powers, x, rows, first, m, EXACT, form, POSITIVE)
        for i in tl.static_range(PIECE):
            lanes += found[i]
    return lanes


@triton.jit
def _exponentials(xs, first, m, EXACT: tl.constexpr, form: tl.constexpr, POSITIVE: tl.constexpr):
    PIECE: tl.constexpr = form.piece
    powers = ()
    for i in tl.static_range(PIECE):
        z = xs[i].to(tl.float32) - m
        power = exponential(z, EXACT)
        if POSITIVE:
            power = tl.where(z > 0.0, float("inf"), power)
        powers = powers + (of_columns(power, first + i, form),)
    return powers


@triton.jit
def maximum_kernel(x_ptr, count, maxima_ptr, form: tl.constexpr):
    """Writes the maxima of the parts of rows."""
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    put_part(maxima_ptr, rows, maximum_of(held(x, rows, form), x, rows, form), form)


@triton.jit
def exponential_sums_kernel(x_ptr, maxima_ptr, count, sums_ptr, EXACT: tl.constexpr, form: tl.constexpr):
    """Writes the sums of exp(x - m) over groups of lanes, with the maximum m."""
    rows = rows_of(count, form)
    x = starts(x_ptr, rows, form)
    kept = held(x, rows, form)
    m = maximum_of_parts(maxima_ptr, rows, form)
    lanes = lanes_of_exponentials(exponentials(kept, m, EXACT, form), x, rows, m, EXACT, form)
    put_groups(sums_ptr, rows, lanes, form)
