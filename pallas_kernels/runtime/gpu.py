"""What lowered kernels depend on of this process's NVIDIA GPUs, apart from their architecture."""

import ctypes
import functools
from typing import Final

import jax

_PLATFORM: Final = "cuda"
_DRIVER: Final = "libcuda.so.1"


@functools.cache
def multiprocessors() -> int | None:
    """Returns how many multiprocessors a GPU of this process has, the least if they differ; None without a GPU."""
    try:
        devices = jax.local_devices(backend=_PLATFORM)
    except RuntimeError:  # the process has no such backend
        return None
    counts = [getattr(device, "core_count", None) for device in devices]
    return min((int(count) for count in counts if count), default=None)


def driver() -> ctypes.CDLL | None:
    """Returns the library of CUDA's driver, None if this machine has none."""
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError:
        return None


@functools.cache
def driver_version() -> tuple[int, int]:
    """Returns the newest version of CUDA that the driver of this machine serves; (0, 0) if there is none."""
    library, found = driver(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(found)):
        return 0, 0
    return found.value // 1000, found.value % 1000 // 10
