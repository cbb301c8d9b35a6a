"""Schedules of the Triton kernels for the gradients of the gated delta rule. None changes a bit.

The table was measured on an H100 (`benchmarks/notes/hybrids-gpu.md`).
"""

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class GradientSchedule:
    """What programs take.

    Attributes:
        columns: Columns of the values in a program of the walk. wgmma multiplies 64 on Hopper.
        warps: Its warps; 4 with 64 columns, since with 8 threads would store an operand of wgmma (`gradient_kernels`).
        stages: Chunks that it reads ahead.
        inner_warps: Warps of a program that has a chunk of a value head.
        inner_columns: Columns of the values that it reads at once, 16 or 32.
        inner_stages: How many of these it reads ahead.
        outer_warps: Warps of a program that has half of the rows of a chunk of a key head.
        outer_columns: Columns of the values that it reads at once.
        outer_stages: How many of these it reads ahead.
    """

    columns: int = 32
    warps: int = 4
    stages: int = 2
    inner_warps: int = 4
    inner_columns: int = 16
    inner_stages: int = 3
    outer_warps: int = 4
    outer_columns: int = 32
    outer_stages: int = 2


_FULL: Final = 128
"""Programs that use a whole GPU."""
_USUAL: Final = GradientSchedule()
_HOPPER: Final = GradientSchedule(64, 4, 2, outer_stages=3)
_HOPPER_FEW: Final = replace(_HOPPER, columns=32, warps=8, stages=3)


def gradient_schedule(heads: int, value_size: int, features: frozenset[str]) -> GradientSchedule:
    """Returns the schedule for a GPU.

    Args:
        heads: Value heads of all sequences.
        value_size: V.
        features: The instruction families of the GPU.

    Example:
        >>> hopper = frozenset({"mma", "wgmma"})
        >>> [gradient_schedule(heads, 128, hopper).columns for heads in (32, 128)]
        [32, 64]
    """
    if "wgmma" not in features:
        return _USUAL
    return _HOPPER if heads * (value_size // _HOPPER.columns) >= _FULL else _HOPPER_FEW
