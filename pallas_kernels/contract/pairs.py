"""The order in which elements are combined by a user's function."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PairContract:
    """How elements are combined by a user's function: pairs of neighbours, then pairs of results, and so on.

    If their number is odd, the last one is carried over. The result is the left operand, the initial value the right.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> PairContract().id
        'pairs/v1/tree'
    """

    version: int = 1

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"pairs/v{self.version}/tree"
