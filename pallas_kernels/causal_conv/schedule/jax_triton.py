"""Schedules of the causal convolution in Triton. They do not affect the bits.

The rule was chosen from the times of `benchmarks/notes/hybrids-gpu.md`.
"""

from dataclasses import dataclass
from typing import Final

_FEW: Final = 8  # tokens, each a row of its own
_ROWS_OF_WARP: Final = 8  # 8 channels of a block for each thread
_ROWS: Final = 16  # 2 channels: a thread holds all blocks of 4 tokens, so more would leave room for few warps
_WARPS: Final = 8
_PHASES: Final = 4


@dataclass(frozen=True)
class ConvSchedule:
    """How tokens are distributed over programs, each of which has 128 channels.

    Attributes:
        rows: Rows of a program; a power of two.
        warps: Warps of a program; a power of two.
        phases: Tokens of a row, which one thread has; at least 1.

    Raises:
        ValueError: If a number is not a power of two.
    """

    rows: int
    warps: int
    phases: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}.")


def conv_schedule(tokens: int) -> ConvSchedule:
    """Returns the schedule for sequences of `tokens` tokens, at least 1.

    Example:
        >>> conv_schedule(1), conv_schedule(2048)
        (ConvSchedule(rows=1, warps=1, phases=1), ConvSchedule(rows=16, warps=8, phases=4))
    """
    if tokens > _FEW:
        return ConvSchedule(_ROWS, _WARPS, _PHASES)
    rows = 1 << (tokens - 1).bit_length()
    return ConvSchedule(rows, max(1, rows // _ROWS_OF_WARP))
