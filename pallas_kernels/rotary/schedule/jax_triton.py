"""Schedules of the Triton kernel of rotary embedding. They do not affect the bits."""

from typing import Final

_PAIRS: Final = 8  # per thread: 16 bytes of each half of a 16-bit head
_WARP: Final = 32
_LEAST_WARPS: Final = 2
_MOST_WARPS: Final = 16


def token_warps(pairs: int) -> int:
    """Returns the warps that share a token.

    Args:
        pairs: Pairs of columns of its queries; a power of two.

    Example:
        >>> token_warps(1024), token_warps(4096), token_warps(16)
        (4, 16, 2)
    """
    return max(_LEAST_WARPS, min(_MOST_WARPS, pairs // (_PAIRS * _WARP)))
