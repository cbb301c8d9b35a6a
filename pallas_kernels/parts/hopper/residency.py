"""How many blocks of a grid run at the same time, for kernels whose blocks wait for one another."""

from pallas_kernels.runtime.gpu import multiprocessors
from pallas_kernels.schedule.hopper.tiles import SMS


def resident_blocks() -> int:
    """Returns the largest grid whose blocks all run at once, one on each multiprocessor.

    A block that waits for another one would wait forever if that one began only when a multiprocessor becomes free.
    H100 PCIe, H20 and parts of a GPU (MIG) have fewer multiprocessors than an H100 SXM. A process without a GPU lowers
    for another machine, which is taken to be one with an H100 SXM.
    """
    return min(SMS, multiprocessors() or SMS)
