"""The order of sums over devices."""

from dataclasses import dataclass, field

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class TreeContract(Contract):
    """How the terms of a sum over devices are added: as a fixed binary tree, in the order of the devices.

    The terms 0, 1, 2, ... are added in pairs of neighbours, the sums in pairs again: (0 + 1) + (2 + 3). Each half of
    the tree is the tree of half as many devices, so a device that has several terms can add them first. The number of
    terms is a power of two. Sums are computed in float32 (float64 for float64) and rounded once.

    Attributes:
        version: Incremented when the bits of an existing contract change on purpose. Version 1 was a sum in ascending
            order, which no device can compute a part of.

    Example:
        >>> TreeContract().id
        'devices/v2/f32-tree'
    """

    ID = "devices/v{version}/f32-tree"
    version: int = field(default=2, kw_only=True)
