"""Schedules of the gated RMSNorm in Triton. They do not affect the bits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedSchedule:
    """How rows are distributed over programs.

    Attributes:
        rows: Rows of a program; a power of two.
        warps: Warps of a program; a power of two.

    Raises:
        ValueError: If a number is not a power of two.
    """

    rows: int
    warps: int

    def __post_init__(self) -> None:
        for name in ("rows", "warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}.")


def gated_schedule() -> GatedSchedule:
    """Returns the schedule of any number of rows, as measured in `benchmarks/notes/hybrids-gpu.md`."""
    return GatedSchedule(8, 1)
