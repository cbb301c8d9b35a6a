"""Schedule of the Triton kernel that draws tokens. It does not affect the bits: any split finds the same maximum."""

from dataclasses import dataclass
from typing import Final

STEP_COLUMNS: Final = 512
_BLOCKS: Final = 2048  # of one warp each: 16 per multiprocessor of an H100
_MOST_STEPS: Final = 32
_SINGLE_STEPS: Final = 4096  # up to this number, one block per step: 16 rows of 128256 columns


@dataclass(frozen=True)
class DrawTile:
    """The work of one thread block.

    Attributes:
        steps: Steps of 512 columns, one after another.
        warps: Warps of a block.
    """

    steps: int
    warps: int = 1


def draw_tile(rows: int, columns: int) -> DrawTile:
    """Returns a tile that leaves work for all multiprocessors; longer tiles can skip more steps.

    Example:
        >>> draw_tile(1, 128256), draw_tile(64, 128256)
        (DrawTile(steps=1, warps=2), DrawTile(steps=8, warps=1))
    """
    all_steps = rows * -(-columns // STEP_COLUMNS)
    if all_steps <= _SINGLE_STEPS:  # with few blocks, two warps halve the latency
        return DrawTile(1, 2 if all_steps <= _BLOCKS else 1)
    steps = all_steps / _BLOCKS
    return DrawTile(min(_MOST_STEPS, 1 << max(0, round(steps) - 1).bit_length()))
