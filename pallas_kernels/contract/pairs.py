"""The order in which elements are combined by a user's function."""

from dataclasses import dataclass

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class PairContract(Contract):
    """How elements are combined by a user's function: pairs of neighbours, then pairs of results, and so on.

    If their number is odd, the last one is carried over. The result is the left operand, the initial value the right.

    Example:
        >>> PairContract().id
        'pairs/v1/tree'
    """

    ID = "pairs/v{version}/tree"
