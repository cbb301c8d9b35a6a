"""Bodies of the Triton kernels that add each token's rows: a program has PIECE columns of one token.

The rows of a token are found in the kernel: by a search among all offsets where there are few, else in what one scatter
has found. Masks that XLA would compute in kernels of their own cost nothing here.
"""

from typing import Final

import triton
import triton.language as tl

from pallas_kernels.parts.no_row import BEFORE_ALL, NO_ROW

_BEFORE_ALL: Final = tl.constexpr(BEFORE_ALL)
_NO_ROW: Final = tl.constexpr(NO_ROW)


@triton.jit
def add_found_kernel(
    rows_ptr,
    found_ptr,
    weight_ptr,
    out_ptr,
    PLACES: tl.constexpr,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Adds the rows that `portable.last_and_first_rows` has found."""
    token = tl.program_id(1)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = column < COLUMNS
    wrong = tl.load(found_ptr + 2 * PLACES) != _BEFORE_ALL
    total = tl.zeros((PIECE,), tl.float32)
    for i in tl.static_range(TOPK):
        place = token * TOPK + i
        row, first = tl.load(found_ptr + 2 * place), tl.load(found_ptr + 2 * place + 1)
        used = row != _BEFORE_ALL
        wrong = wrong | (used & (row != -first))
        here = tl.broadcast_to(row, column.shape) != _BEFORE_ALL
        term = _term(rows_ptr, weight_ptr, place, tl.where(used, row, 0), here, column, inside, COLUMNS)
        total = term if i == 0 else total + term
    _write(out_ptr, token, column, inside, total, wrong, COLUMNS)


@triton.jit
def add_searched_kernel(
    rows_ptr,
    offset_ptr,
    weight_ptr,
    out_ptr,
    GIVEN: tl.constexpr,
    PLACES: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Searches all offsets for the rows of a token, and adds them."""
    token = tl.program_id(1)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = column < COLUMNS
    slot = tl.arange(0, SLOTS)
    last = tl.full((CHUNK, SLOTS), _NO_ROW, tl.int32)
    number = tl.zeros((CHUNK, SLOTS), tl.int32)
    outside = tl.zeros((CHUNK,), tl.int32)
    for start in tl.static_range(0, GIVEN, CHUNK):
        other = start + tl.arange(0, CHUNK)
        read = tl.load(offset_ptr + other, mask=other < GIVEN, other=_NO_ROW)
        mine = read[:, None] == (token * TOPK + slot)[None, :]
        if SLOTS > TOPK:
            mine = mine & (slot < TOPK)[None, :]
        last = tl.maximum(last, tl.where(mine, other[:, None], _NO_ROW))
        number += mine.to(tl.int32)
        outside = tl.maximum(outside, (read >= PLACES).to(tl.int32))
    rows = tl.max(last, axis=0)
    wrong = (tl.max(tl.sum(number, axis=0), axis=0) > 1) | (tl.max(outside, axis=0) > 0)
    total = tl.zeros((PIECE,), tl.float32)
    for i in tl.static_range(TOPK):
        row = tl.sum(tl.where(slot == i, rows, 0), axis=0)
        here = tl.broadcast_to(row, column.shape) >= 0
        term = _term(rows_ptr, weight_ptr, token * TOPK + i, tl.where(row >= 0, row, 0), here, column, inside, COLUMNS)
        total = term if i == 0 else total + term
    _write(out_ptr, token, column, inside, total, wrong, COLUMNS)


@triton.jit
def _term(rows_ptr, weight_ptr, place, row, used, column, inside, COLUMNS: tl.constexpr):
    """Returns the columns of a row times its weight; zeros where there is no row."""
    weight = tl.load(weight_ptr + place).to(tl.float32)
    x = tl.load(rows_ptr + row.to(tl.int64) * COLUMNS + column, mask=inside & used, other=0).to(tl.float32)
    return tl.where(used, x * weight, 0.0)


@triton.jit
def _write(out_ptr, token, column, inside, total, wrong, COLUMNS: tl.constexpr):
    """Writes the sums of a token: +0 rather than -0, nan if a row is wrong."""
    total = tl.where(wrong, float("nan"), tl.where(total == 0, 0.0, total))
    tl.store(out_ptr + token.to(tl.int64) * COLUMNS + column, total.to(out_ptr.dtype.element_ty), mask=inside)
