"""A kept state of a sequence."""

from typing import NamedTuple


class Snapshot(NamedTuple):
    """A state that is kept.

    Attributes:
        position: Tokens before it.
        row: Where it is.
    """

    position: int
    row: int
