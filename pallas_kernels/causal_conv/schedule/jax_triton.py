"""Schedules of the causal convolution in Triton. They do not affect the bits.

The rule was chosen from the times of `benchmarks/notes/hybrids-gpu.md`.
"""

from dataclasses import dataclass
from typing import Final

_FEW: Final = 8  # tokens, each a row of its own
_ROWS: Final = 8
_PHASES: Final = 4
_WIDTHS: Final = (32, 64, 128)


@dataclass(frozen=True)
class ConvSchedule:
    """How tokens are distributed over programs, each of which has 128 channels.

    Attributes:
        rows: Rows of a program; a power of two.
        warps: Warps of a program; a power of two.
        phases: Tokens of a row, which one thread has; at least 1.
        width: Channels of a block, of which a thread has some in each: 32, 64 or 128. Wider ones are read in longer
            pieces and need fewer registers; narrower ones need less exchange for the length of a head.

    Raises:
        ValueError: If a number is not a power of two, or the width another one.
    """

    rows: int
    warps: int
    phases: int = 1
    width: int = 32

    def __post_init__(self) -> None:
        for name in ("rows", "warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}.")
        if self.width not in _WIDTHS:
            raise ValueError(f"width must be 32, 64 or 128, got {self.width}.")


def conv_schedule(tokens: int) -> ConvSchedule:
    """Returns the schedule for sequences of `tokens` tokens, at least 1.

    Example:
        >>> conv_schedule(1)
        ConvSchedule(rows=1, warps=1, phases=1, width=32)
        >>> conv_schedule(2048)
        ConvSchedule(rows=2, warps=1, phases=4, width=128)
    """
    if tokens == 1:
        return ConvSchedule(1, 1)
    return ConvSchedule(_ROWS, 1) if tokens <= _FEW else ConvSchedule(_ROWS // _PHASES, 1, _PHASES, 128)
