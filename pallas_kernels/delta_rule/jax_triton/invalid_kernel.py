"""Body of the Triton kernel that makes the outputs of invalid sequences nan: other sequences are not read."""

import triton
import triton.language as tl


@triton.jit
def invalid_kernel(given_ptr, invalid_ptr, y_ptr, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Fills PIECES pieces of a sequence."""
    sequence = tl.program_id(1).to(tl.int64)
    if tl.load(invalid_ptr + sequence) != 0:
        filled = tl.full((PIECE,), float("nan"), y_ptr.dtype.element_ty)
        first = tl.program_id(0) * (PIECE * PIECES)
        for i in range(PIECES):
            place = first + i * PIECE + tl.arange(0, PIECE)
            tl.store(y_ptr + sequence * SIZE + place, filled, mask=place < SIZE)
