"""Body of the Triton kernel of the largest numbers: a program holds a row and repeatedly takes its largest number."""

from typing import Final

import triton
import triton.language as tl

_LEAST: Final = tl.constexpr(-(2**31))  # below -inf
_NAN: Final = tl.constexpr(0x7FC00000)  # above +inf


@triton.jit
def largest_kernel(
    x_ptr,
    places_ptr,
    numbers_ptr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBER: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Writes the columns of the largest numbers, ties in their order, and the numbers."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    order = tl.where(column < WIDTH, _in_order(x), _LEAST)
    found = tl.zeros((SLOTS,), tl.int32)
    for i in range(NUMBER):
        place = tl.min(tl.where(order == tl.max(order, axis=0), column, WIDTH), axis=0)
        order = tl.where(column == place, _LEAST, order)
        found = tl.where(slot == i, place, found)
    wanted = slot < NUMBER
    chosen = tl.load(x_ptr + row * WIDTH + found, mask=wanted, other=0.0).to(tl.float32)
    tl.store(places_ptr + row * NUMBER + slot, found, mask=wanted)
    tl.store(numbers_ptr + row * NUMBER + slot, chosen, mask=wanted)


@triton.jit
def _in_order(x):
    """Maps float32 to int32 in the same order: -0 equals +0, and nan is above all other numbers."""
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, order)
    return tl.where(order == -1, 0, order)  # -0 maps to -1, next to +0
