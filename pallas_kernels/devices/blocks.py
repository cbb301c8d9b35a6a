"""The shapes that kernels of several GPUs take. They are known before the kernels are imported, which needs Mosaic."""

from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp

COLUMNS: Final = (2048, 1024, 512)
"""Elements that a block of a sum adds: the largest that divides a part."""
VECTOR: Final = 8
"""Elements of 16 bits that a thread loads of a row at once."""
_THREADS: Final = 128


def served(elements: int, devices: int) -> bool:
    """Returns whether the kernel adds arrays of this many elements: each part must be a number of whole blocks."""
    return elements > 0 and elements % (devices * COLUMNS[-1]) == 0


def served_rows(shape: Sequence[int], dtype: Any) -> bool:
    """Returns whether the kernel moves rows of such an array: 16 bits, a vector of each of them for every thread."""
    rows, columns = shape
    return jnp.dtype(dtype).itemsize == 2 and columns % (_THREADS * VECTOR) == 0 and 0 < rows * columns < 1 << 31
