"""Tiles of the XLA programs of attention."""

from typing import NamedTuple

from pallas_kernels.contract import KEY_BLOCK


class Tile(NamedTuple):
    """The shape of one program.

    Attributes:
        sequences: Sequences that it takes at once.
        queries: Queries of each sequence.
        keys: Keys that it reads of each block; fewer than a whole block where the sequences hold no more.
        one_block: Whether the sequences hold no more than one block, so that there is no loop over blocks: XLA compiles
            a loop for longer than what is in it.
        finite: Whether all values are finite, as in comparisons of tiles: the branch for others, a quarter of the time
            to compile, is left out then.
    """

    sequences: int
    queries: int
    keys: int = KEY_BLOCK
    one_block: bool = False
    finite: bool = False
