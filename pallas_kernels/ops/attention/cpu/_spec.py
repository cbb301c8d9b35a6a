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
        soft_cap: Scores are bent to stay below this magnitude; None for none.
    """

    contract: AttentionContract
    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
    soft_cap: float | None = None

    @property
    def factor(self) -> float:
        """What products of queries and keys are multiplied by: the scale, in units of the soft cap if there is one."""
        return self.scale if self.soft_cap is None else self.scale / self.soft_cap
