"""Shared memory and barriers of decode's warpgroups beside the stages of keys and values."""

from typing import Any, NamedTuple

from pallas_kernels.attention.hopper._swapped_walk import Shared
from pallas_kernels.attention.hopper._walk import Parked


class Scratch(NamedTuple):
    """Of warpgroups that compute and of those that copy for them.

    Attributes:
        queries: Rows of two items in turn, of each walker.
        queries_full: A barrier for each.
        queries_free: The same.
        parked: Results of all splits but the last, of items with more than one.
        shared: Of a `SwappedWalk`.
    """

    queries: Any
    queries_full: Any
    queries_free: Any
    parked: Parked | None
    shared: Shared | None
