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
        crossed: Whether the rows of all heads are multiplied by the keys and values of all heads, of which each row
            needs its own: no copy then brings the keys and values of a head together.
    """

    sequences: int
    queries: int
    keys: int = KEY_BLOCK
    one_block: bool = False
    finite: bool = False
    crossed: bool = False
