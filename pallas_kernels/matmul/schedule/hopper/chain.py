"""Hopper schedules of products of few rows whose weights are wgmma's rows from registers."""

from dataclasses import dataclass
from typing import Final, Literal

from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS

_COLUMNS: Final = (8, 16, 32, 64)
_STEP_BYTES: Final = 128  # of a swizzled row
_MOST_STEP_BYTES: Final = 1024  # of K in a stage; a thread holds an eighth of them in registers
_MOST_ROWS: Final = 128
_BARRIER_BYTES: Final = 3 * 1024  # barriers and alignment
_LONG_K: Final = 4096
_FEWEST_COLUMNS: Final = 1024
_FEW_COLUMNS: Final = 2048
_FEWER_COLUMNS: Final = 1280
_LONGER_K: Final = 8192
_MOST_FEW_ROWS: Final = 64
_FEW_ROWS: Final = 32
_READ_COLUMNS: Final = 40  # of weights in shared memory, from the first of a tile on


@dataclass(frozen=True)
class ChainSchedule:
    """Tiles and stages of a product of few rows.

    Attributes:
        columns: Columns of the weights in a block: 8, 16, 32 or 64; 8 of 2-byte weights only if they are (N, K).
        rows: Rows of the activations in a block, a multiple of 8 up to 128.
        k_step: Elements of K in a stage, a multiple of the 128 bytes of a swizzled row up to 1024 bytes.
        stages: Stages in shared memory, at least 2.
        source: Where wgmma reads the weights: from registers, or, of (N, K) weights, from shared memory, or a few steps
            of K from there and the others from registers.
        queued: With both, steps of K of each half of a stage that are read from shared memory. They wait in line at the
            tensor core while a warpgroup waits for other things.
    """

    columns: int
    rows: int
    k_step: int
    stages: int
    source: Literal["registers", "memory", "both"] = "registers"
    queued: int = 4

    def __post_init__(self) -> None:
        if self.columns not in _COLUMNS:
            raise ValueError(f"columns must be one of {_COLUMNS}, got {self}.")
        if not 8 <= self.rows <= _MOST_ROWS or self.rows % 8:
            raise ValueError(f"rows must be a multiple of 8 from 8 to {_MOST_ROWS}, got {self}.")
        if self.k_step < 32 or self.k_step % 32 or self.stages < 2:
            raise ValueError(f"k_step must be a positive multiple of 32 and stages at least 2, got {self}.")

    def fits(self, itemsize: int, transpose_w: bool) -> bool:
        """Returns whether operands of a size can be multiplied so; `transpose_w` for (N, K) weights."""
        step = self.k_step * itemsize
        if self.source == "registers":
            whole = transpose_w or self.columns * itemsize >= 32
        else:
            whole = transpose_w and self.reads_inside(self.stages) and step % (2 * _STEP_BYTES) == 0
        return whole and step % _STEP_BYTES == 0 and step <= _MOST_STEP_BYTES

    def reads_inside(self, stages: int) -> bool:
        """Returns whether wgmma, which reads more columns than a tile has, reads only stages: the others do not count.

        Args:
            stages: Stages of the weights, which those of the activations follow.
        """
        return self.columns + stages * self.rows >= _READ_COLUMNS

    def shared_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of a block."""
        return self.stages * (self.columns + self.rows) * self.k_step * itemsize + _BARRIER_BYTES

    def blocks(self, m: int, n: int) -> int:
        """Returns the number of blocks of an (M, N) result."""
        return -(-m // self.rows) * -(-n // self.columns)


def chain_schedule(m: int, k: int, n: int, *, itemsize: int = 2, transpose_w: bool = False) -> ChainSchedule | None:
    """Returns the schedule of a single product, or None where others are faster.

    Few rows of a long K and few columns, as measured on an H200 (`benchmarks/notes/matmul-hopper.md`). Short stages
    lose: each costs some 400 cycles besides its products.

    Args:
        m: Rows of the activations, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        itemsize: Bytes of an operand's element, 2 or 4.
        transpose_w: Whether the weights are stored as (N, K).

    Example:
        >>> chain_schedule(8, 8192, 1280)
        ChainSchedule(columns=32, rows=8, k_step=512, stages=5, source='registers', queued=4)
        >>> chain_schedule(64, 8192, 1280)
        ChainSchedule(columns=32, rows=32, k_step=384, stages=4, source='registers', queued=4)
        >>> chain_schedule(8, 4096, 14336) is None
        True
        >>> chain_schedule(8, 4096, 1024, itemsize=4, transpose_w=True).source
        'both'
    """
    if k < _LONG_K or n < _FEWEST_COLUMNS or m > _MOST_FEW_ROWS:
        return None
    if transpose_w:
        return _transposed(m, k, n, itemsize)
    form: tuple[int, int, int] | None
    if itemsize == 2:
        form = _of_16_bits(m, k, n)
    elif m <= 8:
        form = (32, 8, 256)
    elif n <= _FEW_COLUMNS:
        form = (32, 16, 256)
    else:
        form = (32, 64, 128) if m > 32 else None
    if form is None:
        return None
    columns, rows, k_step = form
    stages = (SHARED_BYTES - _BARRIER_BYTES) // ((columns + rows) * k_step * itemsize)
    schedule = ChainSchedule(columns, rows, k_step, stages)
    return schedule if schedule.blocks(m, n) <= SMS else None


def _transposed(m: int, k: int, n: int, itemsize: int) -> ChainSchedule | None:
    """Returns the schedule of a product with (N, K) weights, whose first arguments are as checked above."""
    few = n <= _FEWER_COLUMNS
    if n > _FEW_COLUMNS or k * itemsize % _STEP_BYTES:
        return None
    if itemsize == 4:
        schedule = ChainSchedule(32, 32, 128, 6, "memory")
        if m <= _FEW_ROWS:
            schedule = ChainSchedule(32, 8, 256, 5, "both", 6) if m <= 8 else ChainSchedule(32, 16, 256, 4, "both", 6)
    elif m <= 16 or (few and m <= _FEW_ROWS):
        schedule = ChainSchedule(32, 8, 512, 5, "both") if m <= 8 else ChainSchedule(32, 16, 512, 4, "both")
    elif few and k >= _LONGER_K:
        schedule = ChainSchedule(32, 32, 256, 6, "memory")
    else:
        return None
    return schedule if schedule.blocks(m, n) <= SMS else None


def _of_16_bits(m: int, k: int, n: int) -> tuple[int, int, int] | None:
    """Returns columns, rows and the elements of K in a stage of a product of 16-bit numbers."""
    if m <= 16 and n <= _FEW_COLUMNS:
        return 32, 8 if m <= 8 else 16, 512
    if n > _FEWER_COLUMNS:
        return None
    if m <= 32:
        return 32, 16, 512
    return (32, 32, 384) if k >= _LONGER_K else None
