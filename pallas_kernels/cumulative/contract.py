"""The order in which the prefixes of an axis are reduced."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScanContract:
    """How the prefixes of an axis are reduced.

    The axis is split into blocks of `block` elements at 0, block, 2 * block, ... In a block, element i is combined with
    its predecessors at distances 1, 2, 4, ..., block / 2, in this order. The block totals are scanned in the same way,
    and each block but the first is combined with the scan of the preceding totals. Elements only depend on prefixes.

    Attributes:
        block: Elements of a block, a power of two.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> ScanContract().id
        'scan/v1/f32-block128-doubling'
    """

    block: int = 128
    version: int = 1

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"scan/v{self.version}/f32-block{self.block}-doubling"
