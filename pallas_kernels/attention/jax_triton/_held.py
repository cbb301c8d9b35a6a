"""Sums that a program sets aside in an array of its own, where it needs its registers for products."""

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import opaque_32
from pallas_kernels.attention.jax_triton._pieces import piece_count, piece_start, piece_width


@triton.jit
def held_places(held, ROWS: tl.constexpr, form: tl.constexpr):
    """Returns, for each piece of a head, pointers (ROWS, width) to the first number of the thread that has an element.

    Call it before a loop: LLVM would compute the addresses once more at the edge where a loop without steps is left,
    and ptxas would then wait for each product of the loop.

    Args:
        held: Pointer to `ROWS` times `form.value_size` float32 numbers of the program.
        ROWS: Rows of the sums.
        form: The constants.
    """
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    places = ()
    for i in tl.static_range(COUNT):
        first = held + ROWS * piece_start(form.value_size, form.widest_piece, i)
        places = places + (first + _of_thread(ROWS, piece_width(form.value_size, form.widest_piece, i)),)
    return places


@triton.jit
def load_held(places, some):
    """Returns the sums (ROWS, width) of each piece that were set aside, or zeros unless `some`."""
    COUNT: tl.constexpr = len(places)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (_load(_places(places[i]), some),)
    return found


@triton.jit
def store_held(places, sums):
    """Sets sums (ROWS, width) of each piece aside."""
    COUNT: tl.constexpr = len(places)
    for i in tl.static_range(COUNT):
        _store(_places(places[i]), sums[i])


@triton.jit
def _of_thread(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns where the numbers of the thread start that has an element (ROWS, WIDTH) of an accumulator of wgmma.

    A warp has 16 rows, and a thread of it two columns of every 8 in two of the rows. Each of the thread's elements is
    32 after the one before it, so that an instruction of a warp reads or writes neighbours. Any other layout works too.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    return row // 16 * (16 * WIDTH) + (row % 8 * 4 + column // 2 % 4)


@triton.jit
def _places(start):
    """Returns pointers to elements from those to the first one of their threads."""
    ROWS: tl.constexpr = start.shape[0]
    WIDTH: tl.constexpr = start.shape[1]
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    # The sum with a number that the compiler does not see keeps the addresses of all elements from being computed
    # before a loop, and from staying in registers.
    return (start + opaque_32(0)) + (column // 8 * 4 + row // 8 % 2 * 2 + column % 2) * 32


@triton.jit
def _load(place, some):
    """Returns the float32 numbers at pointers, each read by the thread that has it, or zeros unless `some`.

    `tl.load` would read what is next to each other and exchange it between threads through shared memory. It is pure
    for the compiler, which would otherwise read once for each layout that it considers; the pointers are different ones
    for it in each call, so that no result is taken for another.
    """
    asm: tl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.f32 $0, [$1]; }"
    operands = [place.to(tl.int64), some.to(tl.int32)]
    return tl.inline_asm_elementwise(asm, "=&f,l,r", operands, tl.float32, is_pure=True, pack=1)


@triton.jit
def _store(place, x):
    """Writes float32 numbers to pointers, each by the thread that has it."""
    asm: tl.constexpr = "st.global.f32 [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,f", [place.to(tl.int64), x], tl.int32, is_pure=False, pack=1)
