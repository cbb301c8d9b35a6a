"""Schedules of the kernels of the gated delta rule written in Triton. None changes a bit.

The tables were measured on an H100 (`benchmarks/notes/jax-triton.md`).
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Schedule:
    """What one program takes.

    Tiles of fewer than 64 columns, or of fewer than 4 warps, are multiplied by mma.sync on every GPU, others by wgmma
    on Hopper.

    Attributes:
        columns: Columns of the values.
        warps: Its warps.
        stages: Chunks that are read ahead.
        chunk_warps: Warps of a program that computes T of a chunk.
        pieces: With few tokens, how many times `columns` a program computes, one after another.
    """

    columns: int
    warps: int
    stages: int
    chunk_warps: int = 1
    pieces: int = 1


_NARROW: Final = Schedule(32, 4, 2)
_WIDE: Final = Schedule(64, 4, 2)
_FULL: Final = 128
"""Programs that use a whole GPU."""

PARTS: Final = _NARROW
"""For parts of prompts. Keys may be kept ones or new ones, and reach wgmma through stores of threads (`kernels`)."""

CAREFUL: Final = Schedule(32, 4, 1)
"""For what is computed again because a number is not finite."""


def chunks_schedule(value_size: int, features: frozenset[str], *, heads: int) -> Schedule:
    """Returns the schedule of whole sequences.

    Args:
        value_size: V.
        features: The instruction families of the GPU.
        heads: Value heads of all sequences.

    Example:
        >>> hopper = frozenset({"mma", "wgmma"})
        >>> [chunks_schedule(128, hopper, heads=heads).columns for heads in (32, 128)]
        [32, 64]
    """
    fills = heads * (value_size // _WIDE.columns) >= _FULL
    return _WIDE if "wgmma" in features and fills else _NARROW


def decode_schedule(value_size: int, *, heads: int) -> Schedule:
    """Returns the schedule of at most 8 tokens of each sequence.

    Args:
        value_size: V.
        heads: Value heads of all sequences.

    Example:
        >>> [decode_schedule(128, heads=heads).pieces for heads in (32, 64, 2048)]
        [1, 2, 4]
    """
    pieces = value_size // _NARROW.columns
    while pieces > 1 and 2 * heads * (value_size // (_NARROW.columns * pieces)) <= _FULL:
        pieces //= 2
    return Schedule(_NARROW.columns, 4, 1, pieces=pieces)
