"""Schedule of the Triton kernel that draws tokens. It moves no bit: the first of the largest is the same in any cut."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class DrawTile:
    """What one block of threads takes.

    Attributes:
        blocks: Blocks of 256 columns; a power of two.
        warps: Warps of a block.
    """

    blocks: int
    warps: int


DRAW_TILE: Final = DrawTile(blocks=8, warps=4)
