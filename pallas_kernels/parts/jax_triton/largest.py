"""The largest numbers of a row in Triton kernels: a program holds a row and repeatedly takes its largest number.

The row is held in parts, with the largest number of each. Only the part that a number was taken from is searched again.
"""

from typing import Final

import triton
import triton.language as tl

LEAST: Final = tl.constexpr(-(2**31))  # below -inf
_NAN: Final = tl.constexpr(0x7FC00000)  # above +inf


@triton.jit
def places_of_largest(
    orders, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, NUMBER: tl.constexpr, SLOTS: tl.constexpr
):
    """Returns the columns (SLOTS,) of the `NUMBER` largest numbers of a row in parts, as `in_order` maps them."""
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    tops = ()
    found = tl.zeros((SLOTS,), tl.int32)
    if PARTS == 1:
        order = orders[0]
        for k in range(NUMBER):
            place = _first_of(order, tl.max(order, axis=0), column, WIDTH)
            order = tl.where(column == place, LEAST, order)
            found = tl.where(slot == k, place, found)
    else:
        for i in tl.static_range(PARTS):
            tops = tops + (tl.max(orders[i], axis=0),)
        for k in range(NUMBER):
            top, part = tops[0], 0
            for i in tl.static_range(1, PARTS):
                part = tl.where(tops[i] > top, i, part)
                top = tl.maximum(top, tops[i])
            place = 0
            rest, rest_tops = (), ()
            for i in tl.static_range(PARTS):
                order, own_top = orders[i], tops[i]
                if part == i:
                    own = column + i * COLUMNS
                    place = _first_of(order, top, own, WIDTH)
                    order = tl.where(own == place, LEAST, order)
                    own_top = tl.max(order, axis=0)
                rest, rest_tops = rest + (order,), rest_tops + (own_top,)
            orders, tops = rest, rest_tops
            found = tl.where(slot == k, place, found)
    return found


@triton.jit
def _first_of(order, top, column, WIDTH: tl.constexpr):
    """Returns the first column of a number."""
    return tl.min(tl.where(order == top, column, WIDTH), axis=0)


@triton.jit
def in_order(x):
    """Maps float32 to int32 in the same order: -0 equals +0, and nan is above all other numbers."""
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, order)
    return tl.where(order == -1, 0, order)  # -0 maps to -1, next to +0
