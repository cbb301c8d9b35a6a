"""Body of the Triton kernel that routes tokens: softmax, the largest probabilities, and their sum, for one row.

The sum of the exponentials has the order of the kernel of softmax that it stands for: `OnlineRowContract`, in which
every lane has a maximum of its own, or `RowContract`. A row has one group of 128 lanes and one chunk of blocks.
"""

from typing import Final

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import exponential, half_sums
from pallas_kernels.parts.jax_triton.largest import LEAST, in_order, places_of_largest

_LANES: Final = tl.constexpr(128)


@triton.jit
def select_experts_kernel(
    x_ptr,
    places_ptr,
    numbers_ptr,
    totals_ptr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    NUMBER: tl.constexpr,
    SLOTS: tl.constexpr,
    ONLINE: tl.constexpr,
):
    """Writes the columns of the largest probabilities of a row, ties in their order, these numbers, and their sum.

    A row has `WIDTH` columns, and others after them up to `STRIDE`.
    """
    row = tl.program_id(0)
    x_ptr += row * STRIDE
    m, reciprocal = _statistics(x_ptr, WIDTH, ONLINE)
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    orders = ()
    for i in tl.static_range(PARTS):
        own = column + i * COLUMNS
        x = tl.load(x_ptr + own, mask=own < WIDTH, other=0.0)
        orders = orders + (tl.where(own < WIDTH, in_order(exponential(x - m, True) * reciprocal), LEAST),)
    places = places_of_largest(orders, WIDTH, COLUMNS, PARTS, NUMBER, SLOTS)
    wanted = slot < NUMBER
    chosen = exponential(tl.load(x_ptr + places, mask=wanted, other=0.0) - m, True) * reciprocal
    tl.store(places_ptr + row * NUMBER + slot, places, mask=wanted)
    tl.store(numbers_ptr + row * NUMBER + slot, chosen, mask=wanted)
    tl.store(totals_ptr + row, _tree(tl.where(wanted, chosen, 0.0), SLOTS))


@triton.jit
def _statistics(x_ptr, WIDTH: tl.constexpr, ONLINE: tl.constexpr):
    """Returns the maximum of a row, and (1,) 1 / the sum of exponentials; nan if the maximum is not finite."""
    lane = tl.arange(0, _LANES)
    blocks = ()
    for start in tl.static_range(0, WIDTH, _LANES):
        blocks = blocks + (tl.load(x_ptr + start + lane, mask=start + lane < WIDTH, other=float("-inf")),)
    maxima = blocks[0]
    for i in tl.static_range(1, len(blocks)):
        maxima = tl.maximum(maxima, blocks[i])
    m = tl.max(maxima, axis=0)
    shift = m
    if ONLINE:
        shift = _finite(maxima)
    total = exponential(blocks[0] - shift, not ONLINE)
    for i in tl.static_range(1, len(blocks)):
        total += exponential(blocks[i] - shift, not ONLINE)
    if ONLINE:
        total *= exponential(maxima - _finite(m), False)
    total = tl.where(tl.abs(m) < float("inf"), _tree(total, _LANES), float("nan"))
    return m, tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.zeros((1,), tl.float32) + total)


@triton.jit
def _finite(x):
    """Returns x, with 0 for what is not finite."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _tree(x, SIZE: tl.constexpr):
    """Adds the numbers (SIZE,) by a halving tree."""
    return tl.sum(tl.reshape(half_sums(tl.reshape(x, (1, SIZE)), 1, SIZE, 1), (1,)), axis=0)
