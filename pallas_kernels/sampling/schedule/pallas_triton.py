"""Schedule of the Triton kernel that draws tokens. It changes no bit: any cut finds the same first maximum."""

from dataclasses import dataclass
from typing import Final

STEP_COLUMNS: Final = 512
_BLOCKS: Final = 2048  # of one warp each: 16 on each processor of an H100
_MOST_STEPS: Final = 32
_SINGLE_STEPS: Final = 4096  # up to so many of them each has a block: 16 rows of 128256 columns


@dataclass(frozen=True)
class DrawTile:
    """What one block of threads takes.

    Attributes:
        steps: Steps of 512 columns, one after another.
        warps: Warps of a block.
    """

    steps: int
    warps: int = 1


def draw_tile(rows: int, columns: int) -> DrawTile:
    """Returns a tile that leaves work for all processors; the longer it is, the more steps can be cut short.

    Example:
        >>> draw_tile(1, 128256), draw_tile(64, 128256)
        (DrawTile(steps=1, warps=2), DrawTile(steps=8, warps=1))
    """
    all_steps = rows * -(-columns // STEP_COLUMNS)
    if all_steps <= _SINGLE_STEPS:  # two warps halve what one has to wait for, where there are few
        return DrawTile(1, 2 if all_steps <= _BLOCKS else 1)
    steps = all_steps / _BLOCKS
    return DrawTile(min(_MOST_STEPS, 1 << max(0, round(steps) - 1).bit_length()))
