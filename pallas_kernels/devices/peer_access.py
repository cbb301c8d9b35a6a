"""Whether GPUs of this process reach each other's memory as a kernel needs it: the answer of CUDA's driver."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.runtime.gpu import driver

_ACCESS, _ATOMICS = 2, 3
"""`CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED` and `..._NATIVE_ATOMIC_SUPPORTED`.

Kernels signal each other by atomic additions to remote memory. GPUs that NVLink connects have them; over PCIe the
first may hold without the second.
"""


def reach_each_other(devices: Sequence[jax.Device]) -> bool:
    """Returns whether each of the devices can load, store and add atomically in the memory of each other one.

    Devices that are no GPUs of this process, for which a program is lowered that runs elsewhere, count as such that do.

    Args:
        devices: Devices of one process.
    """
    if any(device.platform != "gpu" for device in devices):
        return True
    numbers: list[Any] = [device.local_hardware_id for device in devices]
    return None not in numbers and all(_reaches(a, b) for a in numbers for b in numbers if a != b)


@functools.cache
def _reaches(device: int, peer: int) -> bool:
    """Returns whether a GPU, given by its ordinal, reaches another; False where the driver gives no answer."""
    return all(_attribute(attribute, device, peer) == 1 for attribute in (_ACCESS, _ATOMICS))


def _attribute(attribute: int, device: int, peer: int) -> int | None:
    """Returns what the driver says of a pair of GPUs, None if it gives no answer."""
    library = driver()
    if library is None:
        return None
    try:
        handles = [ctypes.c_int() for _ in range(2)]
        for handle, number in zip(handles, (device, peer), strict=True):
            if library.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(number)):
                return None
        answer = ctypes.c_int()
        if library.cuDeviceGetP2PAttribute(ctypes.byref(answer), ctypes.c_int(attribute), *handles):
            return None
    except AttributeError:  # an old driver has no such function
        return None
    return answer.value
