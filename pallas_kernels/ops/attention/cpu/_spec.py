"""What is fixed about a call of attention."""

from dataclasses import dataclass

from pallas_kernels.contract import AttentionContract


@dataclass(frozen=True)
class AttentionSpec:
    """Order of the sums, scale and mask of a call.

    Attributes:
        contract: Order of all sums.
        scale: Factor of the scores.
        causal: Whether a query sees no later position than its own.
        window: Keys before and after its own position that a query sees at most; None for no such limit.
    """

    contract: AttentionContract
    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
