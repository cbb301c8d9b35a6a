"""Rows that several programs share, each with some lanes, in Triton kernels: what they exchange through memory.

For each sum or maximum of a row there is a kernel whose programs write what they have of it, and a last kernel whose
programs all read that, finish it in the order of `RowContract`, and write their columns of the results.
"""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.rows import Rows, add_groups, group_sums, put


@triton.jit
def put_groups(ptr, rows: Rows, lanes, form: tl.constexpr):
    """Writes the sums of this program's groups of 128 lanes into an array (M, groups of a row)."""
    GROUPS: tl.constexpr = form.lanes // 128
    places = rows.index * (GROUPS * form.parts) + (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    tl.store(ptr + places, tl.reshape(group_sums(lanes, form), (form.rows, GROUPS)))


@triton.jit
def sum_of_groups(ptr, rows: Rows, form: tl.constexpr):
    """Returns the sum (1, 1) of a row from an array of the sums of its groups."""
    GROUPS: tl.constexpr = form.stride // 128
    return add_groups(tl.load(ptr + rows.index * GROUPS + tl.arange(0, GROUPS)[None, :]), form.rows, GROUPS)


@triton.jit
def put_part(ptr, rows: Rows, value, form: tl.constexpr):
    """Writes this program's number (1, 1) of a row into an array (M, parts)."""
    tl.store(ptr + rows.index * form.parts + tl.program_id(1), value)


@triton.jit
def maximum_of_parts(ptr, rows: Rows, form: tl.constexpr):
    """Returns the maximum (1, 1) of a row from an array of the maxima of its parts."""
    PARTS: tl.constexpr = form.parts
    return tl.max(tl.load(ptr + rows.index * PARTS + tl.arange(0, PARTS)[None, :]), axis=1, keep_dims=True)


@triton.jit
def put_once(ptr, rows: Rows, value):
    """Writes a number (1, 1) of a row by its first program."""
    if tl.program_id(1) == 0:
        put(ptr, rows, value)
