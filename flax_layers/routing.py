"""How the tokens of a mixture of experts are routed: the numbers, without arrays."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Selects the experts of a token and their weights.

    The scores of the experts are the softmax or the sigmoids of the router's products, in float32. The experts with the
    largest scores are selected, of equal ones the lower expert; with groups, only experts of the best groups. Weights
    are the scores of the selected experts, normalised and multiplied by `scale`.

    Attributes:
        num_experts: Experts.
        topk: Experts of a token.
        scoring: What makes scores of products.
        normalise: Whether the weights of a token are divided by their sum.
        scale: Scale of the weights.
        num_groups: Consecutive groups of experts, of equal size.
        topk_groups: Groups whose experts may be selected.
        group_score: The score of a group: its largest score, or the sum of its two largest ones.
        use_bias: Whether a vector is added to the scores before experts are selected; the weights are without it.

    Raises:
        ValueError: If numbers contradict each other or are out of range.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024 (groups), and "DeepSeek-V3 Technical Report", 2024 (sigmoid, bias).

    Example:
        >>> Routing(num_experts=128, topk=8).num_groups
        1
    """

    num_experts: int
    topk: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["largest", "two largest"] = "largest"
    use_bias: bool = False

    def __post_init__(self) -> None:
        sizes = self.num_experts, self.topk, self.num_groups, self.topk_groups
        if min(sizes) < 1 or self.num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise ValueError(
                "Routing: expected positive numbers, num_groups that divide num_experts and topk_groups of at most"
                f" num_groups, got num_experts={self.num_experts}, topk={self.topk},"
                f" num_groups={self.num_groups}, topk_groups={self.topk_groups}."
            )
        if self.topk > self.num_experts // self.num_groups * self.topk_groups:
            raise ValueError(f"Routing: topk must be at most the experts of topk_groups groups, got {self}.")
        if self.num_groups > 1 and self.group_score == "two largest" and self.num_experts < 2 * self.num_groups:
            raise ValueError(f"Routing: groups must have two experts or more for their two largest scores, got {self}.")
        if self.scoring not in ("softmax", "sigmoid") or self.group_score not in ("largest", "two largest"):
            raise ValueError(f"Routing: unknown scoring or group_score, got {self}.")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"Routing: scale must be positive and finite, got {self.scale}.")
