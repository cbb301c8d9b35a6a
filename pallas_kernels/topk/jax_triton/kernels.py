"""Body of the Triton kernel of the largest numbers, for one row."""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.largest import LEAST, in_order, places_of_largest


@triton.jit
def largest_kernel(
    x_ptr,
    places_ptr,
    numbers_ptr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    NUMBER: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Writes the columns of the largest numbers, ties in their order, and the numbers; a part has `COLUMNS` columns."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    orders = ()
    for i in tl.static_range(PARTS):
        own = column + i * COLUMNS
        x = tl.load(x_ptr + row * WIDTH + own, mask=own < WIDTH, other=0.0).to(tl.float32)
        orders = orders + (tl.where(own < WIDTH, in_order(x), LEAST),)
    found = places_of_largest(orders, WIDTH, COLUMNS, PARTS, NUMBER, SLOTS)
    wanted = slot < NUMBER
    chosen = tl.load(x_ptr + row * WIDTH + found, mask=wanted, other=0.0).to(tl.float32)
    tl.store(places_ptr + row * NUMBER + slot, found, mask=wanted)
    tl.store(numbers_ptr + row * NUMBER + slot, chosen, mask=wanted)
