"""The contract of products whose sum is cut over devices: see `pallas_kernels.contract`."""

from dataclasses import dataclass

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class KSplitContract(Contract):
    """How one element of `x @ w` is summed when K is cut over 1, 2, 4 or `leaves` devices.

    K is cut into `leaves` ranges of equal length at absolute positions. Each leaf is one product under the contract of
    a whole K of that length, in float32. The sums of the leaves are added in float32 as a fixed binary tree,
    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and rounded once at the end. A device that has K / D of the sum has
    `leaves` / D leaves and computes one subtree, so the bits do not depend on D.

    Attributes:
        leaves: Number of ranges of K; a power of two.

    Example:
        >>> KSplitContract().id, KSplitContract().leaf_length(11008)
        ('matmul/v1/f32-ksplit8-tree', 1376)
    """

    ID = "matmul/v{version}/f32-ksplit{leaves}-tree"
    leaves: int = 8

    def __post_init__(self) -> None:
        if self.leaves < 1 or self.leaves & (self.leaves - 1):
            raise ValueError(f"leaves must be a power of two, got {self.leaves}.")

    def leaf_length(self, k: int) -> int:
        """Returns the elements of a leaf.

        Raises:
            ValueError: If `leaves` does not divide K.
        """
        if k % self.leaves:
            raise ValueError(
                f"K must be a multiple of {self.leaves}, one part for each leaf of the sum, got K={k}; add zeros to"
                " both operands."
            )
        return k // self.leaves
