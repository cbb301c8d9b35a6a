"""The blocks of a sum over GPUs. They are known before its kernel is imported, which needs Mosaic."""

from typing import Final

COLUMNS: Final = (2048, 1024, 512)
"""Elements that a block adds: the largest that divides a part."""


def served(elements: int, devices: int) -> bool:
    """Returns whether the kernel adds arrays of this many elements: each part must be a number of whole blocks."""
    return elements > 0 and elements % (devices * COLUMNS[-1]) == 0
