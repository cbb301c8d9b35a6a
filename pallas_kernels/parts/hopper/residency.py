"""How many blocks of a grid run at the same time, for kernels whose blocks wait for one another."""

import functools
from typing import Final

import jax

from pallas_kernels.schedule.hopper.tiles import SMS

_PLATFORM: Final = "cuda"


@functools.cache
def resident_blocks() -> int:
    """Returns the largest grid whose blocks all run at once, one on each multiprocessor.

    A block that waits for another one would wait forever if that one began only when a multiprocessor becomes free.
    H100 PCIe, H20 and parts of a GPU (MIG) have fewer multiprocessors than an H100 SXM.

    Returns:
        The number of multiprocessors of this process's GPUs, the smallest if they differ, and at most that of an H100
        SXM; that of an H100 SXM if the process has no GPU and lowers for another machine.
    """
    try:
        devices = jax.local_devices(backend=_PLATFORM)
    except RuntimeError:  # the process has no such backend
        return SMS
    return min([SMS, *(int(getattr(device, "core_count", None) or SMS) for device in devices)])
