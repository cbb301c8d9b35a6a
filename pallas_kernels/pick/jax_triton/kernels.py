"""Body of the Triton kernel that picks rows by number: a program copies a row, GROUP pieces at once."""

from typing import Final

import triton
import triton.language as tl

from pallas_kernels.parts.no_row import NO_ROW, UNREAD

_NO_ROW: Final = tl.constexpr(NO_ROW)
_UNREAD: Final = tl.constexpr(UNREAD)


@triton.jit
def pick_kernel(
    x_ptr,
    place_ptr,
    order_ptr,
    out_ptr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Copies a row of x; writes zeros where there is no row, and nan (0 for integers) where its number is wrong.

    A row that nobody reads is not written.
    """
    row = tl.program_id(0)
    if HAS_ORDER:
        row = tl.load(order_ptr + row)
    at = tl.load(place_ptr + row)
    if at == _UNREAD:
        return
    x_ptr += tl.maximum(at, 0).to(tl.int64) * COLUMNS
    out_ptr += row.to(tl.int64) * COLUMNS
    piece = tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, PIECE)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    zero = tl.zeros((GROUP, PIECE), dtype)
    wrong = tl.full((GROUP, PIECE), float("nan"), dtype) if dtype.is_floating() else zero
    for first in range(0, COLUMNS, GROUP * PIECE):
        # All loads are issued before the first store.
        inside = first + piece * PIECE < COLUMNS
        offsets = first + piece * PIECE + column
        copied = tl.load(x_ptr + offsets, mask=inside, other=0)
        filled = tl.where(at >= 0, copied, tl.where(at == _NO_ROW, zero, wrong))
        tl.store(out_ptr + offsets, filled, mask=inside)
