"""Shared memory and barriers of decode's warpgroups, in addition to the stages of keys and values."""

from typing import Any, NamedTuple

from pallas_kernels.attention.hopper._key_loop import Spilled
from pallas_kernels.attention.hopper._swapped_key_loop import Shared


class Scratch(NamedTuple):
    """Of warpgroups that compute and of those that copy for them.

    Attributes:
        queries: Rows of two items in turn, of each worker.
        queries_full: A barrier for each.
        queries_free: The same.
        spilled: Results of all splits but the last, of items with more than one.
        shared: Of a `SwappedKeyLoop`.
    """

    queries: Any
    queries_full: Any
    queries_free: Any
    spilled: Spilled | None
    shared: Shared | None
