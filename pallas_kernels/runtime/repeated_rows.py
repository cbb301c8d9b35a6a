"""Arrays whose rows repeat, in the memory of one repetition.

A comparison needs weights of the product's shape, which for a vocabulary are as large as the model's. Their rows repeat
after a few kinds, so the same pages of memory are mapped at all places. Writing them out would take longer than the
product: new memory costs a page fault for each page, a quarter of a second for 113 MB on some virtual machines.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import os
from typing import Any, Final

import numpy as np

_ALIGNMENT: Final = 64
_LEAST_BYTES: Final = 1 << 22
_MOST_MAPPINGS: Final = 4096
_MAP_FIXED: Final = 0x10  # on x86-64 and aarch64; Python's `mmap` does not name it


def repeated_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns an array of `count` rows that cycle through the given ones; it must not be written to.

    Args:
        rows: (n, K), contiguous.
        count: Rows of the result.

    Returns:
        (count, K), aligned so that XLA uses it without a copy. On Linux, a large one takes the memory of some
        repetitions; on other systems it is written out.

    Example:
        >>> repeated_rows(np.float32([[1], [2]]), 5)[:, 0].tolist()
        [1.0, 2.0, 1.0, 2.0, 1.0]
    """
    size = count * rows.shape[1] * rows.itemsize
    if size >= _LEAST_BYTES and 2 * _mapped_bytes(rows.nbytes, size) <= size and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # sandboxes may forbid the calls
            return _mapped(rows, count, size)
    return _written(rows, count)


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Returns new memory aligned so that XLA uses it without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _written(rows: np.ndarray, count: int) -> np.ndarray:
    (n, k), found = rows.shape, aligned((count, rows.shape[1]), rows.dtype)
    cut = count - count % n
    found[:cut].reshape(-1, n, k)[:] = rows
    found[cut:] = rows[: count - cut]
    return found


def _mapped_bytes(period: int, size: int) -> int:
    """Returns the bytes of the least number of repetitions that fill pages and need few mappings."""
    whole = math.lcm(period, mmap.PAGESIZE)
    return whole * -(-size // (whole * _MOST_MAPPINGS))


def _mapped(rows: np.ndarray, count: int, size: int) -> np.ndarray:
    """Returns the rows with the same pages at all places.

    Raises:
        OSError: If the system refuses one of the calls.
    """
    piece = _mapped_bytes(rows.nbytes, size)
    file = os.memfd_create("repeated_rows")
    try:
        for start in range(0, piece, rows.nbytes):
            os.pwrite(file, rows, start)
        # Python unmaps the whole range when the array is no longer used.
        places = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        found = np.frombuffer(places, rows.dtype).reshape(count, -1)
        for start in range(0, size, piece):
            _map_at(found.ctypes.data + start, min(piece, size - start), file)
    finally:
        os.close(file)
    return found


def _map_at(address: int, size: int, file: int) -> None:
    mapped = _libc().mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, 0)
    if mapped != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    return library
