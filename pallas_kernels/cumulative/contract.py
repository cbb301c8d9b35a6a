"""The order in which the prefixes of an axis are reduced."""

from dataclasses import dataclass

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class ScanContract(Contract):
    """How the prefixes of an axis are reduced.

    The axis is split into blocks of `block` elements at 0, block, 2 * block, ... In a block, element i is combined with
    its predecessors at distances 1, 2, 4, ..., block / 2, in this order. The block totals are scanned in the same way,
    and each block but the first is combined with the scan of the preceding totals. Elements only depend on prefixes.

    Attributes:
        block: Elements of a block, a power of two.

    Example:
        >>> ScanContract().id
        'scan/v1/f32-block128-doubling'
    """

    ID = "scan/v{version}/f32-block{block}-doubling"
    block: int = 128

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}.")
