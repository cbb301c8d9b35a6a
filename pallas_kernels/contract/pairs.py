"""The order in which elements are combined by a function of the user's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PairContract:
    """How elements are combined by a function of the user's: two neighbours at a time, then two results, and so on.

    Where their number is odd, the last one waits. What is left is combined with the initial value, on its right.

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
