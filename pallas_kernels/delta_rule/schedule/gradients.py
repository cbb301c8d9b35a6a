"""Schedules of the Triton kernels for the gradients of the gated delta rule. None changes a bit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientSchedule:
    """What programs take.

    Attributes:
        columns: Columns of the values in a program of the walk.
        warps: Its warps.
        stages: Chunks that it reads ahead.
        inner_warps: Warps of a program that has a chunk of a value head.
        inner_columns: Columns of the values that it reads at once, 16 or 32.
        inner_stages: How many of these it reads ahead.
        outer_warps: Warps of a program that has a chunk of a key head.
        outer_columns: Columns of the values that it reads at once.
        outer_stages: How many of these it reads ahead.
    """

    columns: int = 32
    warps: int = 4
    stages: int = 2
    inner_warps: int = 4
    inner_columns: int = 32
    inner_stages: int = 1
    outer_warps: int = 8
    outer_columns: int = 32
    outer_stages: int = 1


def gradient_schedule(features: frozenset[str]) -> GradientSchedule:
    """Returns the schedule for a GPU.

    Args:
        features: The instruction families of the GPU.
    """
    return GradientSchedule()
